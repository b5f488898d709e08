"""Messages between scheduler, servers and workers over ZeroMQ.

Scheduler and servers bind, each a socket for all who connect; servers connect to the scheduler,
workers to the scheduler and to all servers. Answers come back over the same connection, so workers
need not be reachable. Beats have a connection to the scheduler of their own (identities.py), so
they do not wait behind a model that takes long. What two nodes without a connection send each
other the scheduler hands on.

The scheduler keeps who is there (membership.py) and tells the others in messages of the same kind
as its program's, so they stay in order. Messages are numbered on each link and sent again after a
break (link.py). Large ones, between workers and servers, go few at a time (grants.py). The
caller's thread serves the sockets while it is here, another one when it is away (turns.py). What
comes is checked (reception.py); what is sent waits for room (posting.py).

A node that was declared lost but is alive, because it was suspended, is told so when it speaks
again: `send` and `next` raise `NoMemberError`. It has to join anew, as a new process.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import inf
from typing import Any, Literal

import torch

from gradwire.core.node import Framed
from gradwire.runtime.process import frames
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import ARRIVED, Arrival
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.arrivals import BLOCK_NBYTES, Arrivals
from gradwire.runtime.zeromq.errors import JoinError
from gradwire.runtime.zeromq.identities import make_identity
from gradwire.runtime.zeromq.inbox import Inbox, Letter
from gradwire.runtime.zeromq.keys import JobKeys
from gradwire.runtime.zeromq.link import Out
from gradwire.runtime.zeromq.loop import Loop
from gradwire.runtime.zeromq.members import Desk, Member
from gradwire.runtime.zeromq.membership import Registry
from gradwire.runtime.zeromq.place import Place
from gradwire.runtime.zeromq.posting import Posting
from gradwire.runtime.zeromq.reception import Reception
from gradwire.runtime.zeromq.sockets import Sockets, check_allowed, check_target, reachable
from gradwire.runtime.zeromq.traffic import Traffic
from gradwire.runtime.zeromq.turns import Turns
from gradwire.runtime.zeromq.wire import Wire

_log = logging.getLogger(__name__)
_LINGER_MS = 200
_NO_HEADERS = Headers()
# Connections of strangers: of nodes that will join, in their old and new processes, and as many
# more.
_MAX_CONNECTIONS_PER_NODE, _MAX_OTHERS = 8, 64

Role = Literal["scheduler", "server", "worker"]
Links = Mapping[int, tuple[float, int, int]]  # by peer: its life, received, sent


class ZmqTransport:
    """One node's end; made when the job is complete. Only one thread may use it.

    `scheduler` is the address of the scheduler, `bind` where a server listens; port 0 is any free
    one, and `on_bound` is told the address before the node joins, then `on_wait` for whom the job
    waits, when that changes. Others reach a server at `advertise`, if that is another one. Nodes
    with another `fingerprint` are of another job. `rank` asks for a certain rank.

    A message is acknowledged when `next` has handed it over or, with `acknowledges="asked"`, when
    the caller says so. A server that begins again gives what `links()` was, as of the state that
    it begins with, and sends again what was outstanding then, and all that the one before it sent
    since; or a function that finds it, given its rank, its life (0: it does not begin again) and a
    text that only this job has. Without `links` what it sends is new. `max_large`
    is how many large messages a server takes, and sends, at a time.
    """

    notices_silence = True

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
        on_wait: Callable[[str], None] = lambda text: None,
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
            identity=make_identity(),
            job=blake2b(fingerprint, digest_size=8, person=b"gradwire").digest(),
        )
        self._links = links if callable(links) else None
        self._headers = headers
        self._close_s = close_s
        self._inbox = Inbox()
        self._wire = Wire(
            Sockets(place.identity, keys, max(max_payload_nbytes, BLOCK_NBYTES), heartbeat_s)
        )
        self._turns = Turns(lambda timeout_s: self._loop.stand_in(timeout_s), f"gradwire-{role}")
        self._wire.listen(self._turns.waked.fileno(), self._turns.drain)
        try:
            self.address = ""  # where others reach this node, if they do
            if place.is_scheduler:
                self.address = self._bind(scheduler)
            elif place.is_server:
                self.address = reachable(self._bind(bind), scheduler)
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
                    connect=lambda peer, address: self._reception.connect(peer, address),
                )
            members = self._desk or self._member
            assert members is not None
            self._members: Desk | Member = members
            self._traffic = traffic = members.traffic = Traffic(
                place,
                self._wire,
                self._inbox,
                Arrivals(place.size, headers, max_payload_nbytes, device),
                is_asked=acknowledges == "asked",
                before=None if links is None or callable(links) else dict(links),
                max_bytes=max_bytes_posted,
                max_nbytes=max_payload_nbytes + 2 * BLOCK_NBYTES,
                max_large=max_large,
                resume_s=heartbeat_s,
                on_event=self._take_event,
                on_goodbye=members.left,
                on_problem=members.lose,
            )
            if self._desk is not None:
                traffic.clock = self._desk.now
            self._loop = loop = Loop(self._wire, members, traffic, heartbeat_s)
            self._posting = Posting(place, members, traffic, self._inbox, loop, max_payload_nbytes)
            self._reception = Reception(
                place, self._wire, members, traffic, heartbeat_s=heartbeat_s, on_failure=loop.fail
            )
            self._join(scheduler, join_s, on_wait)
            self._turns.start()
            if self._member is not None:
                self._enter(self._member)
        except BaseException:
            place.is_closed = True
            self._turns.stop()
            self._wire.close(0)
            raise

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
        """Messages and connections that were dropped, by reason."""
        return self._reception.refusals.counts

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        if dst == self.rank:
            with self._turns:
                self._inbox.put(Letter(Arrival(ARRIVED, dst, job, tag, message)))
            return
        header = message.header if isinstance(message, Framed) else None
        priority = float(getattr(header, "priority", 0))
        packed = frames.pack(job, tag, message, self._headers, BLOCK_NBYTES)
        self._post(self._posting.out(dst, packed, priority))

    def send_done(self, dst: int, job: int, number: int) -> None:
        self._post(self._posting.out(dst, frames.pack_control(frames.DONE, job, number)))

    def next(self, timeout_s: float | None) -> Arrival | None:
        limit = inf if timeout_s is None else time.monotonic() + timeout_s
        with self._turns:
            has_served = False
            while True:
                self._loop.check()
                arrival = self._traffic.hand_over()
                if arrival is not None:
                    return arrival
                left = limit - time.monotonic()
                if has_served and left <= 0:
                    return None
                self._loop.once(left)
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
        try:
            with self._turns:
                self._say_goodbye(lost)
        finally:
            self._turns.stop()
            self._wire.close(_LINGER_MS)

    def _say_goodbye(self, lost: int | None) -> None:
        traffic = self._traffic
        packed = frames.pack_control(frames.GOODBYE, 0, 0 if lost is None else lost + 1)
        # Who is gone without a word does not miss the goodbyes that follow.
        num_needed = {peer: link.num_posted for peer, link in traffic.links.items()}
        for peer in range(self.size):
            link = self._posting.route(peer)
            if peer != self.rank and link is not None:
                traffic.post(link, self._posting.out(peer, packed))
        limit = time.monotonic() + self._close_s
        traffic.is_stuck = True  # nobody reads any more
        while self._has_to_stay() and self._loop.failure is None and time.monotonic() < limit:
            self._loop.once(limit - time.monotonic())
        for link in list(traffic.links.values()):
            traffic.tell(link)
            num_left = num_needed.get(link.peer, 0) - link.num_taken_there
            if num_left > 0 and not link.has_left:
                _log.warning(
                    "rank %d leaves, and %d messages to rank %d may not have arrived",
                    self.rank,
                    num_left,
                    link.peer,
                )

    def _post(self, out: Out) -> None:
        with self._turns:
            self._posting.post(out)

    def _has_to_stay(self) -> bool:
        if self._desk is not None and self._desk.registry.there():
            return True
        return any(
            link.num_taken_there < link.num_posted and (link.is_up or not link.has_left)
            for link in self._traffic.links.values()
        )

    # Members.

    def _bind(self, address: str) -> str:
        def on_connection(identity: bytes, is_open: bool) -> None:
            if self._desk is not None:
                self._desk.registry.connection(identity, is_open)

        max_others = _MAX_OTHERS + _MAX_CONNECTIONS_PER_NODE * self.size
        return self._wire.bind(
            address,
            max_others=max_others,
            is_known=lambda node: self._members.knows(node),
            on_change=on_connection,
            on_cut=lambda reason, host, text: self._reception.refusals.add(
                reason, host, text, "connection"
            ),
        )

    def _join(self, scheduler: str, join_s: float, on_wait: Callable[[str], None]) -> None:
        """Until this node has a rank; the scheduler, until all have."""
        limit, told = time.monotonic() + join_s, self._members.waits_for
        with self._turns:
            if self._desk is None:
                self._reception.connect(self._place.scheduler, scheduler)
            else:
                self._reception.open()
            while not self._members.is_in:
                left = limit - time.monotonic()
                if left <= 0:
                    problem = self._members.problem()
                    raise JoinError(f"{problem} (after {join_s:g} s, {scheduler})")
                self._loop.once(left)
                self._loop.check()
                if self._members.waits_for != told and not self._members.is_in:
                    told = self._members.waits_for
                    on_wait(told)

    def _enter(self, member: Member) -> None:
        """Finds what an earlier process left, and begins to speak with the others. The first takes
        as long as it takes to read a state, and meanwhile the stand-in sends beats."""
        if self._links is not None:
            scheduler = member.welcome.entries[-1].identity
            self._traffic.before = dict(self._links(self.rank, self.life, scheduler.hex()))
        with self._turns:
            self._loop.check()
            member.enter()
            self._reception.open()

    def _take_event(self, event: msg.Event) -> None:
        assert self._member is not None, "events come from the scheduler"
        self._member.take_event(event)
