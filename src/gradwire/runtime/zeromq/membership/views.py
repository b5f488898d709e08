"""Membership as one node sees it: it joins, sends heartbeats, and follows joins and losses.

The scheduler has a view, too, and keeps the list for the others. It sends membership events over
the same links as its program's messages, so both stay in order. Heartbeats have a connection of
their own (identities.py), so they do not wait behind a large message.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf

from gradwire.runtime.process.transport import GOODBYE, JOINED, LOST, Arrival
from gradwire.runtime.zeromq import identities
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.connections.sockets import check_target
from gradwire.runtime.zeromq.connections.wire import Wire
from gradwire.runtime.zeromq.errors import NoMemberError, NotAdmittedError, Refusal
from gradwire.runtime.zeromq.links.inbox import Delivery, Inbox
from gradwire.runtime.zeromq.links.link import OutgoingMessage
from gradwire.runtime.zeromq.links.traffic import Traffic
from gradwire.runtime.zeromq.local_node import LocalNode
from gradwire.runtime.zeromq.membership.membership_list import MembershipList

_MAX_DEPARTED = 1024  # identities that are remembered


class MembershipView(ABC):
    """What all nodes do: they keep links to the members that are there."""

    def __init__(self, local: LocalNode, wire: Wire, inbox: Inbox) -> None:
        self.gone: set[int] = set()  # ranks that are lost or have left
        self.departed: dict[bytes, int] = {}  # by identity: the number of its goodbye
        self.traffic: Traffic  # set after this was made
        self._local, self._wire, self._inbox = local, wire, inbox

    def is_known(self, identity: bytes) -> bool:
        """Whether this is a member that we have a link to, or a node that waits to join."""
        return identity in self.traffic.by_identity

    def apply(self, event: msg.MembershipEvent) -> None:
        rank = event.rank
        if not event.has_joined:
            self.lose(rank, event.text, event.time_s)
            return
        is_worker = self._local.layout.is_worker(rank)
        if is_worker:
            self.traffic.remove(rank)  # the link to its earlier incarnation
        was_gone = rank in self.gone
        self.gone.discard(rank)
        self._add_member(rank, event.identity, event.time_s, event.text)
        if is_worker or was_gone:
            self._inbox.put(Delivery(Arrival(JOINED, rank, time_s=event.time_s), is_successor=True))

    @abstractmethod
    def _add_member(self, rank: int, identity: bytes, incarnation: float, address: str) -> None:
        """Makes a link to a member, if this node has links to such members."""

    def lose(self, rank: int, reason: str, time_s: float | None = None) -> None:
        if rank not in self.gone:
            self.gone.add(rank)
            self.traffic.remove(rank)
            self._wire.disconnect(rank)
            self._inbox.put(Delivery(Arrival(LOST, rank, message=reason, time_s=time_s)))

    def note_left(self, rank: int) -> None:
        """The member said goodbye."""
        link = self.traffic.links.get(rank)
        if rank == self._local.scheduler:  # others may still need it, and it waits for them
            if link is not None:
                link.has_left = True
            return
        self.gone.add(rank)
        if link is not None and link.identity is not None:
            self.departed[link.identity] = link.num_taken
            if len(self.departed) > _MAX_DEPARTED:
                del self.departed[next(iter(self.departed))]
        self.traffic.remove(rank)
        self._wire.disconnect(rank)


class SchedulerView(MembershipView):
    """The scheduler's view."""

    def __init__(
        self, local: LocalNode, wire: Wire, inbox: Inbox, membership: MembershipList
    ) -> None:
        super().__init__(local, wire, inbox)
        self.membership = membership
        self._start_s = time.monotonic()

    @property
    def has_joined(self) -> bool:
        return self.membership.is_complete

    @property
    def waiting_reason(self) -> str:
        """The nodes for which the job waits until it is complete."""
        return self.membership.missing()

    def is_known(self, identity: bytes) -> bool:
        return super().is_known(identity) or self.membership.is_waiting(identity)

    def problem(self) -> str:
        return f"the job is not complete: {self.waiting_reason}"

    def tick(self, now: float) -> None:
        self.membership.check(self.now())
        self._publish_changes()

    def take(self, identity: bytes | None, peer: int, kind: int) -> bool:
        """Whether a message from this member was a heartbeat."""
        self.membership.note_message(peer, self.now())
        if kind == msg.HEARTBEAT:
            self._wire.put(identity, peer, self._local.header(msg.HEARTBEAT_REPLY, peer))
        return kind == msg.HEARTBEAT

    def take_join_request(self, identity: bytes, request: msg.JoinRequest, origin: str) -> None:
        """A request that came from the host `origin`."""
        membership = self.membership
        if request.identity != identity:
            raise Refusal("source", "a node says that it is another one", msg.CANNOT_JOIN)
        if identities.heartbeat_owner(identity) is not None:  # or it would be taken for that node
            raise Refusal(
                "source", "a join request over a connection for heartbeats", msg.CANNOT_JOIN
            )
        if request.role == msg.SERVER:
            try:
                check_target(request.address)
            except ValueError as error:  # workers would fail over it
                raise Refusal("join request", str(error), msg.CANNOT_JOIN) from None
        problem = membership.request_join(request, self.now(), origin)
        if problem is not None:
            raise Refusal("join request", problem, msg.CANNOT_JOIN)
        self._publish_changes()
        if membership.rank(identity) is None:
            text = membership.waiting_reason(identity)
            head = self._local.header(msg.WAIT)
            self._wire.put(identity, msg.NOBODY, head, msg.pack_text(text))

    def note_left(self, rank: int) -> None:
        self.membership.note_left(rank, self.now())
        super().note_left(rank)

    def now(self) -> float:
        return time.monotonic() - self._start_s

    def _publish_changes(self) -> None:
        """Sends all members what has changed."""
        membership, links = self.membership, self.traffic.links
        events, membership.events = membership.events, []
        accepted, membership.accepted = membership.accepted, []
        changed = {event.rank for event in events}
        for rank in accepted:
            if rank not in links and rank not in changed:
                self._add_member(rank, membership.identity(rank), membership.incarnation(rank), "")
        for event in events:
            self.apply(event)
            body = msg.pack_body(event)
            for peer, link in list(links.items()):
                if peer != event.rank:
                    out = OutgoingMessage(msg.MEMBERSHIP, self._local.rank, peer, body, None, 0.0)
                    self.traffic.post(link, out)
        for rank in accepted:
            body = msg.pack_body(membership.acceptance(rank))
            identity = membership.identity(rank)
            self._wire.put(identity, rank, self._local.header(msg.ACCEPTED), body)

    def _add_member(self, rank: int, identity: bytes, incarnation: float, address: str) -> None:
        if rank in self.traffic.links:  # a server, started again: it reports what it still knows
            self.traffic.replace(rank, identity)
        else:
            self.traffic.add(rank, identity, incarnation)


class MemberView(MembershipView):
    """A worker's or a server's view. `connect(peer, address)` makes a connection.

    Once it has joined it has a rank and an `acceptance`, and sends heartbeats. It has links to
    others after `enter`.
    """

    def __init__(
        self,
        local: LocalNode,
        wire: Wire,
        inbox: Inbox,
        request: msg.JoinRequest,
        *,
        heartbeat_s: float,
        server_s: float,
        connect: Callable[[int, str], None],
    ) -> None:
        super().__init__(local, wire, inbox)
        self.failure: Exception | None = None
        self.waiting_reason = ""  # as the scheduler says
        self.acceptance: msg.JoinAccepted  # once it has joined
        self._request = request
        self._heartbeat_s, self._server_s = heartbeat_s, server_s
        self._connect = connect
        self._last_event_s = -1.0  # events up to this time are known
        self._last_message_s = self._tick_s = time.monotonic()
        self._heartbeat_sent_s = -inf
        self._last_reply_s = inf  # or when the first heartbeat was sent

    @property
    def has_joined(self) -> bool:
        return self._local.rank >= 0

    def problem(self) -> str:
        reason = self.waiting_reason or (
            "it does not answer. Is it running, is this its address, and are the keys the same?"
        )
        return f"this {self._local.role_name} could not join at the scheduler: {reason}"

    def ask_to_join(self) -> None:
        head = self._local.header(msg.JOIN)
        self._wire.put(None, self._local.scheduler, head, msg.pack_body(self._request))

    def tick(self, now: float) -> None:
        local = self._local
        if now - self._tick_s > self._heartbeat_s / 2:
            self._last_message_s += now - self._tick_s  # this process was suspended
        self._tick_s = now
        if not self.has_joined:
            self.ask_to_join()
            return
        if now - self._heartbeat_sent_s >= self._heartbeat_s / 5 and not local.is_closed:
            self._heartbeat_sent_s = now
            self._last_reply_s = min(self._last_reply_s, now)
            is_answered = now - self._last_reply_s < 2 / 5 * self._heartbeat_s
            head = local.header(msg.HEARTBEAT, local.scheduler)
            self._wire.send_heartbeat(local.scheduler, head, is_answered=is_answered)
        if now - self._last_message_s > self._server_s:
            reason = f"nothing was received from the scheduler for {self._server_s:g} s"
            self.lose(local.scheduler, reason)

    def take(self, kind: int, body: bytes) -> bool:
        """Whether a message from the scheduler was about the membership of this node."""
        self._last_message_s = time.monotonic()
        if kind == msg.ACCEPTED:
            self._take_acceptance(msg.unpack_body(body, msg.JoinAccepted))
        elif kind == msg.WAIT:
            self.waiting_reason = msg.unpack_text(body)
        elif kind == msg.HEARTBEAT_REPLY:
            self._last_reply_s = self._last_message_s
        return kind in (msg.ACCEPTED, msg.WAIT, msg.HEARTBEAT_REPLY)

    def take_error(self, code: int, text: str) -> bool:
        """The scheduler refuses something; whether this node cannot continue because of it."""
        if code == msg.CANNOT_JOIN and not self.has_joined:
            text = f"the scheduler refuses this {self._local.role_name}: {text}"
            self.failure = NotAdmittedError(text)
        elif code == msg.DECLARED_LOST and self.has_joined and not self._local.is_closed:
            self.failure = NoMemberError(
                f"rank {self._local.rank} is not in the job any more ({text}). What it does now is "
                "lost; start it again, and it joins as a new one."
            )
        return self.failure is not None

    def take_event(self, event: msg.MembershipEvent) -> None:
        if event.time_s > self._last_event_s:
            self._last_event_s = event.time_s
            self.apply(event)

    def _take_acceptance(self, acceptance: msg.JoinAccepted) -> None:
        if self.has_joined:
            return
        self.acceptance = acceptance
        self._local.rank, self._local.incarnation = acceptance.rank, acceptance.incarnation
        self._last_event_s = acceptance.time_s
        if acceptance.heartbeat_s > 0:
            self._heartbeat_s = min(self._heartbeat_s, acceptance.heartbeat_s)

    def enter(self) -> None:
        """Makes links to the members that were there when this node got its rank. Later changes
        come over the link to the scheduler."""
        local = self._local
        for one in self.acceptance.members:
            if one.rank == local.rank or one.rank in self.gone:  # the scheduler, lost since then
                continue
            if one.is_there:
                self._add_member(one.rank, one.identity, one.incarnation, one.address)
                is_late = local.incarnation > 0 and one.incarnation > 0
                if is_late and local.layout.is_worker(one.rank):
                    self._inbox.put(Delivery(Arrival(JOINED, one.rank, time_s=one.incarnation)))
                continue
            self.gone.add(one.rank)
            gone = Arrival(GOODBYE, one.rank)
            if not one.has_left:
                reason = "it was lost before this node came"
                gone = Arrival(LOST, one.rank, message=reason, time_s=one.time_s)
            self._inbox.put(Delivery(gone))

    def _add_member(self, rank: int, identity: bytes, incarnation: float, address: str) -> None:
        local, traffic = self._local, self.traffic
        if rank == local.scheduler:
            traffic.resume(traffic.add(rank, None, 0.0))
        elif local.is_worker and local.layout.is_server(rank):
            if rank not in traffic.links:
                traffic.add(rank, None, local.incarnation)
            self._connect(rank, address)
        elif local.is_server and local.layout.is_worker(rank):
            traffic.add(rank, identity, incarnation)
