"""Sends the caller's messages: chooses the link, and waits for room on it (back-pressure)."""

import time
from math import inf

from gradwire.runtime.process.frames import Packed
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.links.inbox import Inbox
from gradwire.runtime.zeromq.links.link import Link, OutgoingMessage
from gradwire.runtime.zeromq.links.traffic import Traffic
from gradwire.runtime.zeromq.local_node import LocalNode
from gradwire.runtime.zeromq.loop import Loop
from gradwire.runtime.zeromq.membership.views import MembershipView

_STUCK_S = 1.0  # without progress


class Sender:
    """Of one node; called in the caller's turn. `max_nbytes` is the limit of a payload."""

    def __init__(
        self,
        local: LocalNode,
        view: MembershipView,
        traffic: Traffic,
        inbox: Inbox,
        loop: Loop,
        max_nbytes: int,
    ) -> None:
        self._local, self._view, self._traffic, self._loop = local, view, traffic, loop
        self._inbox = inbox
        self._max_nbytes = max_nbytes

    def out(self, dst: int, packed: Packed, priority: float = 0.0) -> OutgoingMessage:
        """The message to `dst`, if it is not too large."""
        rank = self._local.rank
        payload = None if packed.payload is None else packed.payload.numpy().data
        if payload is not None and len(payload) > self._max_nbytes:
            raise ValueError(
                f"rank {rank} sends {len(payload)} bytes in one message to {dst}; the limit "
                f"is {self._max_nbytes}. Use more servers, so that shards are smaller."
            )
        return OutgoingMessage(msg.DATA, rank, dst, packed.block.numpy().data, payload, priority)

    def route(self, dst: int) -> Link | None:
        """The link by which a message goes; None if its receiver is gone."""
        rank, size = self._local.rank, self._local.size
        if not 0 <= dst < size:
            raise ValueError(f"rank {rank} sends to {dst}; ranks are 0 .. {size - 1}")
        if dst in self._view.gone:
            return None
        links = self._traffic.links
        return links.get(dst) or links.get(self._local.scheduler)

    def post(self, out: OutgoingMessage) -> None:
        """Waits until there is room. A message for a process that is gone is dropped, even if
        another one has taken its rank."""
        self._loop.check()
        link = self._route_to_known(out.dst)
        if link is not None and not self._has_room(link, out.nbytes):
            link = self._wait_for_room(out.dst, out.nbytes)
        if link is not None:
            self._traffic.post(link, out)

    def _route_to_known(self, dst: int) -> Link | None:
        """None also if the caller does not know yet that another process has taken the rank: that
        one must not get an answer to a request that it has not made."""
        link = self.route(dst)
        return None if self._inbox.is_succeeded(dst) else link

    def _has_room(self, link: Link, nbytes: int) -> bool:
        return not link.bytes_posted or link.bytes_posted + nbytes <= self._traffic.max_bytes

    def _wait_for_room(self, dst: int, nbytes: int) -> Link | None:
        """The link, or None if the receiver is gone by then.

        None also if the scheduler is lost: nobody would report the loss of the receiver, and the
        job ends anyway, with what `next` says.
        """
        traffic, last, since = self._traffic, -1, 0.0
        try:
            while True:
                route = self._route_to_known(dst)
                if route is None or self._has_room(route, nbytes):
                    return route
                if self._local.scheduler in self._view.gone:
                    return None
                now = time.monotonic()
                if route.bytes_posted != last:
                    last, since, traffic.is_stuck = route.bytes_posted, now, False
                elif now - since > _STUCK_S and not traffic.is_stuck:
                    traffic.is_stuck = True
                    for link in traffic.links.values():
                        traffic.schedule_report(link, 0.0)
                self._loop.once(inf)
                self._loop.check()
        finally:
            traffic.is_stuck = False
