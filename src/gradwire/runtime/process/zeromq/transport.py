"""Messages between scheduler, servers and workers over ZeroMQ.

Scheduler and servers bind, each a socket for all who connect; servers connect to the scheduler,
workers to the scheduler and to all servers. Answers come back over the same connection, so workers
need not be reachable. What two nodes without a connection send each other the scheduler hands on.

The scheduler keeps who is there (membership.py) and tells the others in messages of the same kind
as its program's, so they stay in order. Messages are numbered on each link and sent again after a
break (link.py). Large ones, between workers and servers, go few at a time (grants.py). The
caller's thread serves the sockets while it is here, another one when it is away (turns.py).

A node that was declared lost but is alive, because it was suspended, is told so when it speaks
again: `send` and `next` raise `NoMemberError`. It has to join anew, as a new process.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import inf
from typing import Any, Literal

import torch

from gradwire.core.errors import WireError
from gradwire.core.node import Framed
from gradwire.runtime.process import frames
from gradwire.runtime.process.frames import Headers, Packed
from gradwire.runtime.process.transport import ARRIVED, Arrival
from gradwire.runtime.process.zeromq import messages as msg
from gradwire.runtime.process.zeromq.arrivals import BLOCK_NBYTES, Arrivals
from gradwire.runtime.process.zeromq.errors import JoinError
from gradwire.runtime.process.zeromq.inbox import Inbox, Letter
from gradwire.runtime.process.zeromq.keys import JobKeys
from gradwire.runtime.process.zeromq.link import Link, Out
from gradwire.runtime.process.zeromq.members import Desk, Member
from gradwire.runtime.process.zeromq.membership import Registry
from gradwire.runtime.process.zeromq.messages import Header
from gradwire.runtime.process.zeromq.place import Place
from gradwire.runtime.process.zeromq.refusals import Refusal, Refusals
from gradwire.runtime.process.zeromq.sockets import (
    CONNECTED,
    TURNED_AWAY,
    Sockets,
    check_allowed,
    check_target,
    reachable,
)
from gradwire.runtime.process.zeromq.traffic import Traffic
from gradwire.runtime.process.zeromq.turns import Turns
from gradwire.runtime.process.zeromq.wire import Wire

_log = logging.getLogger(__name__)
_TICK_S = 0.1
_LINGER_MS = 200
_STUCK_S = 1.0  # without progress in `send`
_NO_HEADERS = Headers()

Role = Literal["scheduler", "server", "worker"]
Links = Mapping[int, tuple[float, int, int]]  # by peer: its life, received, sent


class ZmqTransport:
    """One node's end; made when the job is complete. Only one thread may use it.

    `scheduler` is the address of the scheduler, `bind` where a server listens; port 0 is any free
    one, and `on_bound` is told the address before the node joins. Others reach a server at
    `advertise`, if that is another one. Nodes with another `fingerprint` are of another job. `rank`
    asks for a certain rank.

    A message is acknowledged when `next` has handed it over or, with `acknowledges="asked"`, when
    the caller says so. A server that begins again gives what `links()` was, as of the state that
    it begins with, and sends again what was outstanding then; or a function that finds it, given
    its rank, its life (0: it does not begin again) and a text that only this job has. `max_large`
    is how many large messages a server takes, and sends, at a time.
    """

    def __init__(
        self,
        role: Role,
        *,
        scheduler: str,
        num_workers: int,
        num_servers: int,
        rank: int | None = None,
        bind: str = "tcp://127.0.0.1:0",
        advertise: str | None = None,
        on_bound: Callable[[str], None] | None = None,
        fingerprint: bytes = b"",
        headers: Headers = _NO_HEADERS,
        keys: JobKeys | None = None,
        insecure: bool = False,
        heartbeat_s: float = 5.0,
        join_s: float = 60.0,
        server_s: float = 60.0,
        close_s: float = 5.0,
        acknowledges: Literal["received", "asked"] = "received",
        links: Links | Callable[[int, float, str], Links] | None = None,
        max_bytes_posted: int = 64 << 20,  # to one peer
        max_payload_nbytes: int = 1 << 30,
        max_large: int = 1,
        device: torch.device | None = None,
    ) -> None:
        check_allowed(scheduler, keys, insecure)
        if role == "server":
            check_allowed(bind, keys, insecure)
            if advertise is not None:
                check_target(advertise)
        self._place = place = Place(
            msg.ROLES.index(role),
            num_workers,
            num_servers,
            # A routing id must not begin with a zero.
            identity=b"\x01" + os.urandom(msg.IDENTITY_NBYTES - 1),
            job=blake2b(fingerprint, digest_size=8, person=b"gradwire").digest(),
        )
        self._links = links if callable(links) else None
        self._headers = headers
        self._heartbeat_s, self._close_s = heartbeat_s, close_s
        self._max_payload_nbytes = max_payload_nbytes
        self._refusals = Refusals(role)
        self._inbox = Inbox()
        self._failure: Exception | None = None
        self._tick_s = time.monotonic()
        self._wire = Wire(
            Sockets(place.identity, keys, max(max_payload_nbytes, BLOCK_NBYTES), heartbeat_s)
        )
        self._turns = Turns(self._stand_in, f"gradwire-{role}")
        self._wire.listen(self._turns.waked.fileno(), self._turns.drain)
        try:
            self.address = ""  # where others reach this node, if they do
            if place.is_scheduler:
                self.address = self._wire.bind(scheduler)
            elif place.is_server:
                self.address = reachable(self._wire.bind(bind), scheduler)
            if on_bound is not None and self.address:
                on_bound(self.address)
            if advertise is not None and place.is_server:
                self.address = advertise
            self._desk: Desk | None = None
            self._member: Member | None = None
            if place.is_scheduler:
                place.rank = place.scheduler
                registry = Registry(
                    num_workers,
                    num_servers,
                    place.identity,
                    heartbeat_s=heartbeat_s,
                    server_s=server_s,
                )
                self._desk = Desk(place, self._wire, self._inbox, registry)
            else:
                wanted = msg.NOBODY if rank is None else rank
                self._member = Member(
                    place,
                    self._wire,
                    self._inbox,
                    msg.Hello(
                        place.identity, place.role, wanted, num_workers, num_servers, self.address
                    ),
                    heartbeat_s=heartbeat_s,
                    server_s=server_s,
                    connect=self._connect,
                    welcomed=self._welcomed,
                    enter=lambda: self._wire.serve(self._read),
                )
            members = self._desk or self._member
            assert members is not None
            self._members: Desk | Member = members
            self._traffic = self._members.traffic = Traffic(
                place,
                self._wire,
                self._inbox,
                Arrivals(place.size, headers, max_payload_nbytes, device),
                is_asked=acknowledges == "asked",
                before={} if callable(links) else dict(links or {}),
                max_bytes=max_bytes_posted,
                max_nbytes=max_payload_nbytes + 2 * BLOCK_NBYTES,
                max_large=max_large,
                resume_s=heartbeat_s,
                on_event=self._take_event,
                on_goodbye=self._members.left,
                on_problem=self._members.lose,
            )
            if self._desk is not None:
                self._traffic.clock = self._desk.now
            self._join(scheduler, join_s)
        except BaseException:
            place.is_closed = True
            self._turns.stop()
            self._wire.close(0)
            raise
        self._turns.start()

    # What the engine asks for.

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def size(self) -> int:
        return self._place.size

    @property
    def life(self) -> float:
        """When this node came, on the clock of the scheduler; 0: it was there from the start."""
        return self._place.life

    @property
    def num_bytes_sent(self) -> int:
        """All that was given to the sockets."""
        return self._wire.num_bytes_sent

    @property
    def num_sent_again(self) -> int:
        """Messages that may not have arrived when a connection broke."""
        return self._traffic.num_sent_again

    @property
    def refused(self) -> Counter[str]:
        """Messages that were dropped, by reason."""
        return self._refusals.counts

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        if dst == self.rank:
            with self._turns:
                self._inbox.put(Letter(Arrival(ARRIVED, dst, job, tag, message)))
            return
        header = message.header if isinstance(message, Framed) else None
        priority = float(getattr(header, "priority", 0))
        self._post(dst, frames.pack(job, tag, message, self._headers, BLOCK_NBYTES), priority)

    def send_done(self, dst: int, job: int, number: int) -> None:
        self._post(dst, frames.pack_control(frames.DONE, job, number))

    def next(self, timeout_s: float | None) -> Arrival | None:
        limit = inf if timeout_s is None else time.monotonic() + timeout_s
        with self._turns:
            has_served = False
            while True:
                if self._failure is not None:
                    raise self._failure
                arrival = self._traffic.hand_over()
                if arrival is not None:
                    return arrival
                left = limit - time.monotonic()
                if has_served and left <= 0:
                    return None
                self._serve(left)
                has_served = True

    def keep(self, arrival: Arrival) -> None:
        self._inbox.keep(arrival)

    def kept(self, job: int) -> list[Arrival]:
        return self._inbox.kept(job)

    # What servers that are to survive ask for.

    def acknowledge(self, src: int, number: int) -> None:
        """Messages of `src` up to this number need not be kept for us any more."""
        with self._turns:
            link = self._traffic.links.get(src)
            if link is not None:
                link.acknowledge(number)
                self._traffic.owe(link)

    def links(self) -> dict[int, tuple[float, int, int]]:
        """By peer: its life, and how many messages of it are acknowledged and were sent to it."""
        with self._turns:
            return {
                peer: (link.life, link.num_cleared, link.num_posted)
                for peer, link in self._traffic.links.items()
            }

    def outstanding(self) -> dict[int, int]:
        """By peer: how many of the messages that were sent to it it may not have."""
        with self._turns:
            return {peer: len(link.kept) for peer, link in self._traffic.links.items()}

    def close(self, lost: int | None = None) -> None:
        """Says goodbye, and waits (not for long) until what was sent has arrived. The scheduler
        waits until the others have left, too, since they may need it.

        `lost` is the rank without which this one cannot go on, if that is why it leaves.
        """
        if self._place.is_closed:
            return
        self._place.is_closed = True
        traffic = self._traffic
        with self._turns:
            packed = frames.pack_control(frames.GOODBYE, 0, 0 if lost is None else lost + 1)
            body = packed.block.numpy().data
            for peer in range(self.size):
                link = self._route(peer)
                if peer != self.rank and link is not None:
                    traffic.post(link, Out(msg.DATA, self.rank, peer, body, None, 0.0))
            limit = time.monotonic() + self._close_s
            traffic.is_stuck = True  # nobody reads any more
            while self._has_to_stay() and self._failure is None and time.monotonic() < limit:
                self._serve(limit - time.monotonic())
            for link in list(traffic.links.values()):
                traffic.tell(link)
                num_left = link.num_posted - link.num_taken_there
                if num_left > 0 and not link.has_left:
                    _log.warning(
                        "rank %d leaves, and %d messages to rank %d may not have arrived",
                        self.rank,
                        num_left,
                        link.peer,
                    )
        self._turns.stop()
        self._wire.close(_LINGER_MS)

    def _has_to_stay(self) -> bool:
        if self._desk is not None and self._desk.registry.there():
            return True
        return any(
            link.num_taken_there < link.num_posted and (link.is_up or not link.has_left)
            for link in self._traffic.links.values()
        )

    # Out.

    def _route(self, dst: int) -> Link | None:
        """By which link a message goes; None if its receiver is gone."""
        if not 0 <= dst < self.size:
            raise ValueError(f"rank {self.rank} sends to {dst}; ranks are 0 .. {self.size - 1}")
        if dst in self._members.gone:
            return None
        links = self._traffic.links
        return links.get(dst) or links.get(self._place.scheduler)

    def _post(self, dst: int, packed: Packed, priority: float = 0.0) -> None:
        payload = None if packed.payload is None else packed.payload.numpy().data
        if payload is not None and len(payload) > self._max_payload_nbytes:
            raise ValueError(
                f"rank {self.rank} sends {len(payload)} bytes in one message to {dst}; the limit "
                f"is {self._max_payload_nbytes}. Use more servers, so that shards are smaller."
            )
        out = Out(msg.DATA, self.rank, dst, packed.block.numpy().data, payload, priority)
        with self._turns:
            if self._failure is not None:
                raise self._failure
            link = self._route(dst)
            if link is not None and not self._has_room(link, out.nbytes):
                link = self._wait_for_room(dst, out.nbytes)
            if link is not None:
                self._traffic.post(link, out)

    def _has_room(self, link: Link, nbytes: int) -> bool:
        return not link.bytes_posted or link.bytes_posted + nbytes <= self._traffic.max_bytes

    def _wait_for_room(self, dst: int, nbytes: int) -> Link | None:
        """The link, or None if the receiver is gone by then."""
        traffic, last, since = self._traffic, -1, 0.0
        try:
            while True:
                route = self._route(dst)
                if route is None or self._has_room(route, nbytes):
                    return route
                now = time.monotonic()
                if route.bytes_posted != last:
                    last, since, traffic.is_stuck = route.bytes_posted, now, False
                elif now - since > _STUCK_S and not traffic.is_stuck:
                    traffic.is_stuck = True
                    for link in traffic.links.values():
                        traffic.owe(link, 0.0)
                self._serve(inf)
                if self._failure is not None:
                    raise self._failure
        finally:
            traffic.is_stuck = False

    # The sockets.

    def _serve(self, timeout_s: float) -> None:
        """Does what is due, waits for the sockets, and reads them. It is our turn."""
        now = time.monotonic()
        if now >= self._tick_s:
            self._members.tick(now)
            self._traffic.tick()
            self._tick_s = now + min(_TICK_S, self._heartbeat_s / 8)
        due = min(self._tick_s, self._traffic.do_what_is_due(now))
        self._wire.poll(min(timeout_s, due - now))

    def _stand_in(self, timeout_s: float) -> None:
        """The same while the caller is away, which is told of what goes wrong when it is back."""
        if self._failure is not None:
            time.sleep(0.01)
            return
        try:
            self._serve(timeout_s)
        except Exception as error:
            self._failure = error

    def _welcomed(self, scheduler: bytes) -> None:
        if self._links is not None:
            self._traffic.before = dict(self._links(self.rank, self.life, scheduler.hex()))

    def _connect(self, peer: int, address: str) -> None:
        self._wire.connect(peer, address, self._read, self._changed)

    def _changed(self, peer: int, change: int) -> None:
        """Something happened to a connection of ours."""
        link = self._traffic.links.get(peer)
        if link is not None:
            self._traffic.down(link)
            if change == CONNECTED:
                self._traffic.resume(link)
        elif self._member is not None and peer == self._place.scheduler:
            if change == CONNECTED:
                self._member.say_hello()
            elif change == TURNED_AWAY:
                self._member.heard = "it turns us away. Do all nodes have the same keys?"

    def _join(self, scheduler: str, join_s: float) -> None:
        """Until this node is in; the scheduler, until all are."""
        limit = time.monotonic() + join_s
        with self._turns:
            if self._desk is None:
                self._connect(self._place.scheduler, scheduler)
            else:
                self._wire.serve(self._read)
            while not self._members.is_in:
                left = limit - time.monotonic()
                if left <= 0:
                    problem = self._members.problem()
                    raise JoinError(f"{problem} (after {join_s:g} s, {scheduler})")
                self._serve(left)
                if self._failure is not None:
                    raise self._failure

    # In.

    def _read(self, identity: bytes | None, peer: int, parts: list[Any]) -> None:
        try:
            self._take(identity, peer, parts)
        except WireError as error:
            self._refuse(identity, peer, error)

    def _refuse(self, identity: bytes | None, peer: int, error: WireError) -> None:
        """Counts it, and tells the peer."""
        reason, code = "malformed", msg.REFUSED
        if isinstance(error, Refusal):
            reason, code = error.reason, error.code
        who = f"rank {peer}" if identity is None else identity.hex()
        self._refusals.add(reason, who, str(error))
        head = self._place.header(msg.ERROR, code=code)
        self._wire.put(identity, peer, head, msg.pack_text(str(error)))

    def _take(self, identity: bytes | None, peer: int, parts: list[Any]) -> None:
        """A message came, to our binding socket or from a peer that we connected to."""
        if not 2 <= len(parts) <= 3:
            raise Refusal("malformed", f"a message of {len(parts)} parts")
        header = msg.unpack_header(parts[0].bytes)
        kind = header.kind
        if kind == msg.ERROR:  # of a stranger it means nothing; and errors beget no errors
            if identity is None:
                self._take_error(peer, header.code, msg.unpack_text(parts[1].bytes))
            return
        if header.job != self._place.job:
            raise Refusal(
                "job", "it is of another job: are all nodes configured alike?", msg.CANNOT_JOIN
            )
        if len(parts) != (3 if kind == msg.DATA and header.nbytes else 2):
            raise Refusal("malformed", f"kind {kind} in {len(parts)} parts")
        if len(parts[1]) > BLOCK_NBYTES:
            raise Refusal("oversized", f"a body of {len(parts[1])} bytes")
        if kind == msg.HELLO:
            if self._desk is None or identity is None:
                raise Refusal("state", "only the scheduler lets others in", msg.CANNOT_JOIN)
            self._desk.take_hello(identity, msg.unpack_hello(parts[1].bytes))
            return
        if identity is not None:
            if identity in self._members.departed:
                return  # its last words
            peer = self._peer(identity, header)
        self._check_ends(peer, header)
        if self._desk is not None:
            if self._desk.take(identity, peer, kind):
                return
        elif peer == self._place.scheduler:
            assert self._member is not None
            if self._member.take(kind, parts[1].bytes if kind not in msg.NUMBERED else b""):
                return
        link = self._traffic.links.get(peer)
        if link is None:
            raise Refusal("state", f"rank {peer} has not joined, or is gone")
        self._traffic.take(link, header, parts)

    def _peer(self, identity: bytes, header: Header) -> int:
        """Who has this identity."""
        peer = self._traffic.by_identity.get(identity)
        if peer is not None:
            return peer
        if self._desk is not None and self._desk.registry.is_expelled(identity):
            raise Refusal(
                "declared lost",
                f"rank {header.src} was silent for more than {self._heartbeat_s:g} s, or another "
                "process has taken its place",
                msg.DECLARED_LOST,
            )
        raise Refusal("unknown peer", "it has not joined this job")

    def _check_ends(self, peer: int, header: Header) -> None:
        """Only the scheduler hands on what is from others, and gets what is for others."""
        is_data = header.kind == msg.DATA
        if header.src != peer and not (is_data and peer == self._place.scheduler):
            raise Refusal("source", f"rank {peer} says that it is rank {header.src}")
        is_ours = header.dst in (self.rank, msg.NOBODY)
        if not is_ours and not (is_data and self._place.is_scheduler):
            raise Refusal("destination", f"a message for rank {header.dst}")

    def _take_event(self, event: msg.Event) -> None:
        assert self._member is not None, "events come from the scheduler"
        self._member.take_event(event)

    def _take_error(self, peer: int, code: int, text: str) -> None:
        member = self._member
        if member is not None and peer == self._place.scheduler and member.take_error(code, text):
            self._failure = member.failure
            return
        link = self._traffic.links.get(peer)
        if link is not None:
            link.resume_s = 0.0  # perhaps it did not know us yet
        self._refusals.add("error reply", f"rank {peer}", f"it answers with an error: {text}")
