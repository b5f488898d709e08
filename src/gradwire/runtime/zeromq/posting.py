"""What the caller sends: by which link it goes, and how long the caller waits for room on it."""

import time
from math import inf

from gradwire.runtime.process.frames import Packed
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.inbox import Inbox
from gradwire.runtime.zeromq.link import Link, Out
from gradwire.runtime.zeromq.loop import Loop
from gradwire.runtime.zeromq.members import Members
from gradwire.runtime.zeromq.place import Place
from gradwire.runtime.zeromq.traffic import Traffic

_STUCK_S = 1.0  # without progress


class Posting:
    """Of one node; it is the caller's turn. `max_nbytes` is the limit of a payload."""

    def __init__(
        self,
        place: Place,
        members: Members,
        traffic: Traffic,
        inbox: Inbox,
        loop: Loop,
        max_nbytes: int,
    ) -> None:
        self._place, self._members, self._traffic, self._loop = place, members, traffic, loop
        self._inbox = inbox
        self._max_nbytes = max_nbytes

    def out(self, dst: int, packed: Packed, priority: float = 0.0) -> Out:
        """A message to `dst`, if it may be sent."""
        rank = self._place.rank
        payload = None if packed.payload is None else packed.payload.numpy().data
        if payload is not None and len(payload) > self._max_nbytes:
            raise ValueError(
                f"rank {rank} sends {len(payload)} bytes in one message to {dst}; the limit "
                f"is {self._max_nbytes}. Use more servers, so that shards are smaller."
            )
        return Out(msg.DATA, rank, dst, packed.block.numpy().data, payload, priority)

    def route(self, dst: int) -> Link | None:
        """By which link a message goes; None if its receiver is gone."""
        rank, size = self._place.rank, self._place.size
        if not 0 <= dst < size:
            raise ValueError(f"rank {rank} sends to {dst}; ranks are 0 .. {size - 1}")
        if dst in self._members.gone:
            return None
        links = self._traffic.links
        return links.get(dst) or links.get(self._place.scheduler)

    def post(self, out: Out) -> None:
        """Waits until there is room. What is for somebody who is gone is dropped, whether or not
        another one has come to that rank."""
        self._loop.check()
        link = self._route_to_known(out.dst)
        if link is not None and not self._has_room(link, out.nbytes):
            link = self._wait_for_room(out.dst, out.nbytes)
        if link is not None:
            self._traffic.post(link, out)

    def _route_to_known(self, dst: int) -> Link | None:
        """None also if the caller means one that is gone, and does not know it yet: the one that
        is there now must not get an answer to what it has not asked."""
        link = self.route(dst)
        return None if self._inbox.is_succeeded(dst) else link

    def _has_room(self, link: Link, nbytes: int) -> bool:
        return not link.bytes_posted or link.bytes_posted + nbytes <= self._traffic.max_bytes

    def _wait_for_room(self, dst: int, nbytes: int) -> Link | None:
        """The link, or None if the receiver is gone by then."""
        traffic, last, since = self._traffic, -1, 0.0
        try:
            while True:
                route = self._route_to_known(dst)
                if route is None or self._has_room(route, nbytes):
                    return route
                now = time.monotonic()
                if route.bytes_posted != last:
                    last, since, traffic.is_stuck = route.bytes_posted, now, False
                elif now - since > _STUCK_S and not traffic.is_stuck:
                    traffic.is_stuck = True
                    for link in traffic.links.values():
                        traffic.owe(link, 0.0)
                self._loop.once(inf)
                self._loop.check()
        finally:
            traffic.is_stuck = False
