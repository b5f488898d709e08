"""The transport of one node over ZeroMQ.

Scheduler and servers bind one socket each. Servers connect to the scheduler, workers to the
scheduler and to all servers. Answers come back over the same connection, so workers need not be
reachable. The scheduler relays messages between nodes that have no connection.

The scheduler keeps the membership (membership/). Messages are numbered on each link and sent again
after a break; large ones between workers and servers go few at a time (links/). The caller's
thread serves the sockets while it waits here, another one when it is away (turns.py). Everything
that arrives is checked (receiver.py); a send waits for room (links/sender.py).

A node that was declared lost but is alive, because it was suspended, gets an error when it sends
again: `send` and `next` raise `NoMemberError`. It has to join again as a new process.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from math import inf
from typing import Any, Literal

import torch

from gradwire.core.layout import NodeLayout, RoleName
from gradwire.core.node import Framed
from gradwire.runtime.process import frames
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.transport import ARRIVED, WOKEN, Arrival, LinkCounts
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.connections.sockets import (
    Sockets,
    check_allowed,
    check_target,
    reachable,
)
from gradwire.runtime.zeromq.connections.wire import Wire
from gradwire.runtime.zeromq.errors import JoinError
from gradwire.runtime.zeromq.identities import make_identity
from gradwire.runtime.zeromq.keys import JobKeys
from gradwire.runtime.zeromq.links.arrival_decoder import BLOCK_NBYTES, ArrivalDecoder
from gradwire.runtime.zeromq.links.inbox import Delivery, Inbox
from gradwire.runtime.zeromq.links.link import OutgoingMessage
from gradwire.runtime.zeromq.links.sender import Sender
from gradwire.runtime.zeromq.links.traffic import Traffic
from gradwire.runtime.zeromq.local_node import LocalNode
from gradwire.runtime.zeromq.loop import Loop
from gradwire.runtime.zeromq.membership.membership_list import MembershipList
from gradwire.runtime.zeromq.membership.views import MemberView, SchedulerView
from gradwire.runtime.zeromq.receiver import Receiver
from gradwire.runtime.zeromq.turns import Turns

_log = logging.getLogger(__name__)
_LINGER_MS = 200
_NO_HEADERS = Headers()
# Connections of strangers: of nodes that will join, in their old and new processes, and others.
_MAX_CONNECTIONS_PER_NODE, _MAX_OTHERS = 8, 64


class ZmqTransport:
    """Returns from its constructor when the job is complete. Only one thread may use it, but for
    `wake`.

    `scheduler` is the address of the scheduler, `bind` that on which a server listens; port 0 is
    any free one. `on_bound` gets the address before the node joins, `on_wait` the nodes for which
    the job waits, whenever that changes. Others reach a server at `advertise`, if that differs.
    Nodes with another `fingerprint` are of another job. `rank` asks for a certain rank.

    A message is acknowledged when `next` has handed it over or, with `acknowledges="asked"`, when
    the caller calls `acknowledge`. A server that is started again passes the `links()` that belong
    to the state it continues from; it sends again what was outstanding then, and everything that
    the process before it sent since. Instead it may pass a function that finds them, given its
    rank, its incarnation (0: it was not started again) and a text that only this job has. Without
    `links` its messages are new. `max_large` is how many large messages a server receives, and
    sends, at a time. With `closed_s` the scheduler also counts a node as lost whose connections
    have been closed for so long without a goodbye, as those of a killed process.
    """

    notices_silence = True

    def __init__(
        self,
        role: RoleName,
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
        closed_s: float | None = None,
        join_s: float = 60.0,
        server_s: float = 60.0,
        close_s: float = 5.0,
        acknowledges: Literal["received", "asked"] = "received",
        links: LinkCounts | Callable[[int, float, str], LinkCounts] | None = None,
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
        self._local = local = LocalNode(
            msg.ROLES.index(role),
            NodeLayout(num_workers, num_servers, 1),
            identity=make_identity(),
            job=blake2b(fingerprint, digest_size=8, person=b"gradwire").digest(),
        )
        self._links = links if callable(links) else None
        self.headers = headers
        self._close_s = close_s
        self._is_woken = False
        self._inbox = Inbox()
        self._wire = Wire(
            Sockets(local.identity, keys, max(max_payload_nbytes, BLOCK_NBYTES), heartbeat_s)
        )
        self._turns = Turns(lambda timeout_s: self._loop.stand_in(timeout_s), f"gradwire-{role}")
        self._wire.listen(self._turns.woken.fileno(), self._turns.drain)
        try:
            self.address = ""  # where others reach this node, if they do
            if local.is_scheduler:
                self.address = self._bind(scheduler)
            elif local.is_server:
                self.address = reachable(self._bind(bind), scheduler)
            if on_bound is not None and self.address:
                on_bound(self.address)
            if advertise is not None and local.is_server:
                self.address = advertise
            self._scheduler_view: SchedulerView | None = None
            self._member_view: MemberView | None = None
            if local.is_scheduler:
                local.rank = local.scheduler
                membership = MembershipList(
                    local.layout,
                    local.identity,
                    heartbeat_s=heartbeat_s,
                    server_s=server_s,
                    closed_s=closed_s,
                )
                self._scheduler_view = SchedulerView(local, self._wire, self._inbox, membership)
            else:
                wanted = msg.NOBODY if rank is None else rank
                self._member_view = MemberView(
                    local,
                    self._wire,
                    self._inbox,
                    msg.JoinRequest(
                        local.identity, local.role, wanted, num_workers, num_servers, self.address
                    ),
                    heartbeat_s=heartbeat_s,
                    server_s=server_s,
                    connect=lambda peer, address: self._receiver.connect(peer, address),
                )
            view = self._scheduler_view or self._member_view
            assert view is not None
            self._view: SchedulerView | MemberView = view
            self._traffic = traffic = view.traffic = Traffic(
                local,
                self._wire,
                self._inbox,
                ArrivalDecoder(local.size, headers, max_payload_nbytes, device),
                caller_acknowledges=acknowledges == "asked",
                before=None if links is None or callable(links) else dict(links),
                max_bytes=max_bytes_posted,
                max_nbytes=max_payload_nbytes + 2 * BLOCK_NBYTES,
                max_large=max_large,
                resume_s=heartbeat_s,
                on_event=self._take_event,
                on_goodbye=view.note_left,
                on_problem=view.lose,
            )
            if self._scheduler_view is not None:
                traffic.clock = self._scheduler_view.now
            self._loop = loop = Loop(self._wire, view, traffic, heartbeat_s)
            self._sender = Sender(local, view, traffic, self._inbox, loop, max_payload_nbytes)
            self._receiver = Receiver(
                local, self._wire, view, traffic, heartbeat_s=heartbeat_s, on_failure=loop.fail
            )
            self._join(scheduler, join_s, on_wait)
            self._turns.start()
            if self._member_view is not None:
                self._enter(self._member_view)
        except BaseException:
            local.is_closed = True
            self._turns.stop()
            self._wire.close(0)
            raise

    # The interface of a transport.

    @property
    def rank(self) -> int:
        return self._local.rank

    @property
    def size(self) -> int:
        return self._local.size

    @property
    def incarnation(self) -> float:
        """When this node joined, on the clock of the scheduler; 0: it was there from the start."""
        return self._local.incarnation

    @property
    def num_bytes_sent(self) -> int:
        """All bytes that were given to the sockets, headers included."""
        return self._wire.num_bytes_sent

    @property
    def num_sent_again(self) -> int:
        """Messages that may not have arrived when a connection broke."""
        return self._traffic.num_sent_again

    @property
    def refused(self) -> Counter[str]:
        """Messages and connections that were dropped, by reason."""
        return self._receiver.refusals.counts

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        if dst == self.rank:
            with self._turns:
                self._inbox.put(Delivery(Arrival(ARRIVED, dst, job, tag, message)))
            return
        header = message.header if isinstance(message, Framed) else None
        priority = float(getattr(header, "priority", 0))
        packed = frames.pack(job, tag, message, self.headers, BLOCK_NBYTES)
        self._post(self._sender.out(dst, packed, priority))

    def send_done(self, dst: int, job: int, number: int) -> None:
        self._post(self._sender.out(dst, frames.pack_control(frames.DONE, job, number)))

    def next(self, timeout_s: float | None) -> Arrival | None:
        limit = inf if timeout_s is None else time.monotonic() + timeout_s
        with self._turns:
            has_served = False
            while True:
                self._loop.check()
                arrival = self._traffic.hand_over()
                if arrival is not None:
                    return arrival
                if self._is_woken:
                    self._is_woken = False
                    return Arrival(WOKEN, self.rank)
                left = limit - time.monotonic()
                if has_served and left <= 0:
                    return None
                self._loop.once(left)
                has_served = True

    def wake(self) -> None:
        """Lets `next` return. Any thread may call it."""
        self._is_woken = True
        self._turns.wake()

    def defer(self, arrival: Arrival) -> None:
        self._inbox.defer(arrival)

    def deferred(self, job: int) -> list[Arrival]:
        return self._inbox.deferred(job)

    # For durable servers.

    def acknowledge(self, src: int, number: int) -> None:
        """`src` need not keep its messages up to this number any more."""
        with self._turns:
            link = self._traffic.links.get(src)
            if link is not None:
                link.acknowledge(number)
                self._traffic.schedule_report(link)

    def links(self) -> LinkCounts:
        """As of now: messages that were acknowledged count as received."""
        with self._turns:
            return {
                peer: (link.incarnation, link.num_cleared, link.num_posted)
                for peer, link in self._traffic.links.items()
            }

    def outstanding(self) -> dict[int, int]:
        """By peer: how many of the messages to it may not have arrived."""
        with self._turns:
            return {peer: len(link.resend_queue) for peer, link in self._traffic.links.items()}

    def close(self, lost: int | None = None) -> None:
        """Says goodbye, and waits up to `close_s` until what was sent has arrived. The scheduler
        waits until the others have left, too, since they may need it.

        `lost` is the rank without which this one cannot continue, if that is why it leaves.
        """
        if self._local.is_closed:
            return
        self._local.is_closed = True
        try:
            with self._turns:
                self._say_goodbye(lost)
        finally:
            self._turns.stop()
            self._wire.close(_LINGER_MS)

    def _say_goodbye(self, lost: int | None) -> None:
        traffic = self._traffic
        packed = frames.pack_control(frames.GOODBYE, 0, 0 if lost is None else lost + 1)
        # A peer that is gone does not miss the goodbyes that follow.
        num_needed = {peer: link.num_posted for peer, link in traffic.links.items()}
        for peer in range(self.size):
            link = self._sender.route(peer)
            if peer != self.rank and link is not None:
                traffic.post(link, self._sender.out(peer, packed))
        limit = time.monotonic() + self._close_s
        traffic.is_stuck = True  # the caller does not read any more
        while self._has_to_stay() and self._loop.failure is None and time.monotonic() < limit:
            self._loop.once(limit - time.monotonic())
        for link in list(traffic.links.values()):
            traffic.report_counts(link)
            num_left = num_needed.get(link.peer, 0) - link.num_taken_there
            if num_left > 0 and not link.has_left:
                _log.warning(
                    "rank %d leaves, and %d messages to rank %d may not have arrived",
                    self.rank,
                    num_left,
                    link.peer,
                )

    def _post(self, out: OutgoingMessage) -> None:
        with self._turns:
            self._sender.post(out)

    def _has_to_stay(self) -> bool:
        if self._scheduler_view is not None and self._scheduler_view.membership.present_ranks():
            return True
        return any(
            link.num_taken_there < link.num_posted and (link.is_up or not link.has_left)
            for link in self._traffic.links.values()
        )

    # MembershipView.

    def _bind(self, address: str) -> str:
        def on_connection(identity: bytes, is_open: bool) -> None:
            if self._scheduler_view is not None:
                self._scheduler_view.membership.note_connection(identity, is_open)

        max_others = _MAX_OTHERS + _MAX_CONNECTIONS_PER_NODE * self.size
        return self._wire.bind(
            address,
            max_others=max_others,
            is_known=lambda node: self._view.is_known(node),
            on_change=on_connection,
            on_cut=lambda reason, host, text: self._receiver.refusals.add(
                reason, host, text, "connection"
            ),
        )

    def _join(self, scheduler: str, join_s: float, on_wait: Callable[[str], None]) -> None:
        """Waits until this node has a rank; the scheduler, until all nodes have."""
        limit, reported = time.monotonic() + join_s, self._view.waiting_reason
        with self._turns:
            if self._scheduler_view is None:
                self._receiver.connect(self._local.scheduler, scheduler)
            else:
                self._receiver.open()
            while not self._view.has_joined:
                left = limit - time.monotonic()
                if left <= 0:
                    problem = self._view.problem()
                    raise JoinError(f"{problem} (after {join_s:g} s, {scheduler})")
                self._loop.once(left)
                self._loop.check()
                if self._view.waiting_reason != reported and not self._view.has_joined:
                    reported = self._view.waiting_reason
                    on_wait(reported)

    def _enter(self, member: MemberView) -> None:
        """Finds what an earlier process left, and makes links to the others. Meanwhile the stand-in
        sends heartbeats, since reading a state may take long."""
        if self._links is not None:
            scheduler = member.acceptance.members[-1].identity
            self._traffic.before = dict(self._links(self.rank, self.incarnation, scheduler.hex()))
        with self._turns:
            self._loop.check()
            member.enter()
            self._receiver.open()

    def _take_event(self, event: msg.MembershipEvent) -> None:
        assert self._member_view is not None, "events come from the scheduler"
        self._member_view.take_event(event)
