"""Checks the messages that come from the sockets of a node, and hands them on.

Messages come to our binding socket from anybody, or from a peer that we connected to. Nothing in
them is trusted before it is checked. A message that is malformed, too large, of another version or
job, from a stranger or out of turn is counted (`refusals`), logged once per reason and peer,
answered with an error, and dropped.
"""

from collections.abc import Callable
from typing import Any

from gradwire.core.errors import WireError
from gradwire.runtime.zeromq import identities
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.connections.sockets import CONNECTED, TURNED_AWAY
from gradwire.runtime.zeromq.connections.wire import Wire
from gradwire.runtime.zeromq.errors import Refusal, RefusalLog
from gradwire.runtime.zeromq.links.arrival_decoder import BLOCK_NBYTES
from gradwire.runtime.zeromq.links.traffic import Traffic
from gradwire.runtime.zeromq.local_node import LocalNode
from gradwire.runtime.zeromq.membership.views import MemberView, SchedulerView
from gradwire.runtime.zeromq.messages import Header


class Receiver:
    """Of one node. `on_failure` is called if the scheduler says that this node cannot continue."""

    def __init__(
        self,
        local: LocalNode,
        wire: Wire,
        view: SchedulerView | MemberView,
        traffic: Traffic,
        *,
        heartbeat_s: float,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.refusals = RefusalLog(local.role_name)
        self._local, self._wire, self._view, self._traffic = local, wire, view, traffic
        self._scheduler_view = view if isinstance(view, SchedulerView) else None
        self._member_view = view if isinstance(view, MemberView) else None
        self._heartbeat_s = heartbeat_s
        self._on_failure = on_failure

    def open(self) -> None:
        """Begins to receive from nodes that connect to us."""
        self._wire.serve(self.take)

    def connect(self, peer: int, address: str) -> None:
        self._wire.connect(peer, address, self.take, self.note_change)
        if peer == self._local.scheduler:
            self._wire.connect_for_heartbeats(peer, address, self.take)

    def note_change(self, peer: int, change: int) -> None:
        """Something happened to a connection of ours."""
        link = self._traffic.links.get(peer)
        if link is not None:
            self._traffic.down(link)
            if change == CONNECTED:
                self._traffic.resume(link)
        elif self._member_view is not None and peer == self._local.scheduler:
            if change == CONNECTED:
                self._member_view.ask_to_join()
            elif change == TURNED_AWAY:
                self._member_view.waiting_reason = (
                    "it turns us away, or does not answer in time. Do all nodes have the same keys?"
                )

    def take(self, identity: bytes | None, peer: int, parts: list[Any]) -> None:
        """A message came, to our binding socket or from a peer that we connected to."""
        try:
            self._take(identity, peer, parts)
        except WireError as error:
            self._refuse(identity, peer, error)

    def _refuse(self, identity: bytes | None, peer: int, error: WireError) -> None:
        """Counts a refused message, and sends the reason to its sender."""
        reason, code = "malformed", msg.REFUSED
        if isinstance(error, Refusal):
            reason, code = error.reason, error.code
        sender = f"rank {peer}"
        if identity is not None:
            known = self._traffic.by_identity.get(self._node(identity))
            stranger = f"a node that is not in the job ({identity.hex()[2:10]})"
            sender = stranger if known is None else f"rank {known}"
        self.refusals.add(reason, sender, str(error))
        head = self._local.header(msg.ERROR, code=code)
        self._wire.put(identity, peer, head, msg.pack_text(str(error)))

    def _take(self, identity: bytes | None, peer: int, parts: list[Any]) -> None:
        if not parts:
            raise Refusal("oversized", "a part of a message is too long, or has no end")
        if not 2 <= len(parts) <= 3:
            raise Refusal("malformed", f"a message of {len(parts)} parts")
        header = msg.unpack_header(parts[0].bytes)
        kind = header.kind
        if kind == msg.ERROR:  # of a stranger it means nothing; and errors are not answered
            if identity is None:
                self._take_error(peer, header.code, msg.unpack_text(parts[1].bytes))
            return
        if header.job != self._local.job:
            raise Refusal(
                "job",
                "it is of another job: it has other settings, or another version of gradwire. All "
                "nodes of a job take the same settings, or the same --config FILE",
                msg.CANNOT_JOIN,
            )
        if len(parts) != (3 if kind == msg.DATA and header.nbytes else 2):
            raise Refusal("malformed", f"kind {kind} in {len(parts)} parts")
        if len(parts[1]) > BLOCK_NBYTES:
            raise Refusal("oversized", f"a body of {len(parts[1])} bytes")
        if kind == msg.JOIN:
            if self._scheduler_view is None or identity is None:
                raise Refusal("state", "only the scheduler lets others in", msg.CANNOT_JOIN)
            origin = parts[0].get("Peer-Address")
            request = msg.unpack_body(parts[1].bytes, msg.JoinRequest)
            self._scheduler_view.take_join_request(identity, request, origin)
            return
        if identity is not None:
            node = self._node(identity)
            if node in self._view.departed:  # its last messages
                if kind == msg.RESUME and node == identity:
                    self._answer_departed(identity, header.src)
                return
            peer = self._peer(node, header)
            self._wire.is_member(identity, parts[0])
            if node != identity and kind != msg.HEARTBEAT:
                raise Refusal("state", f"kind {kind} over a connection for heartbeats")
        self._check_ends(peer, header)
        if self._scheduler_view is not None:
            if self._scheduler_view.take(identity, peer, kind):
                return
        elif peer == self._local.scheduler:
            assert self._member_view is not None
            if self._member_view.take(kind, parts[1].bytes if kind not in msg.NUMBERED else b""):
                return
        link = self._traffic.links.get(peer)
        if link is None:
            raise Refusal("state", f"rank {peer} has not joined, or is gone")
        self._traffic.take(link, header, parts)

    def _answer_departed(self, identity: bytes, peer: int) -> None:
        """A node that leaves waits until it knows that its last message has arrived."""
        local, taken = self._local, self._view.departed[identity]
        head = Header(msg.RESUMED, local.job, local.rank, peer, 1, 0, taken, taken, taken).pack()
        body = msg.pack_body(msg.Resume(local.incarnation, False, -1.0))
        self._wire.put(identity, peer, head, body)

    def _node(self, identity: bytes) -> bytes:
        """The node whose connection this is. The scheduler knows two of each."""
        node = identities.heartbeat_owner(identity) if self._scheduler_view is not None else None
        return identity if node is None else node

    def _peer(self, identity: bytes, header: Header) -> int:
        """The rank with this identity."""
        peer = self._traffic.by_identity.get(identity)
        if peer is not None:
            return peer
        if self._scheduler_view is not None and self._scheduler_view.membership.is_expelled(
            identity
        ):
            raise Refusal(
                "declared lost",
                f"rank {header.src} was silent for more than {self._heartbeat_s:g} s, or another "
                "process has taken its place",
                msg.DECLARED_LOST,
            )
        raise Refusal("unknown peer", "it has not joined this job, or has connected anew since")

    def _check_ends(self, peer: int, header: Header) -> None:
        """Only the scheduler sends messages of others, and receives messages for others."""
        is_data = header.kind == msg.DATA
        if header.src != peer and not (is_data and peer == self._local.scheduler):
            raise Refusal("source", f"rank {peer} says that it is rank {header.src}")
        is_ours = header.dst in (self._local.rank, msg.NOBODY)
        if not is_ours and not (is_data and self._local.is_scheduler):
            raise Refusal("destination", f"a message for rank {header.dst}")

    def _take_error(self, peer: int, code: int, text: str) -> None:
        member = self._member_view
        if member is not None and peer == self._local.scheduler and member.take_error(code, text):
            assert member.failure is not None
            self._on_failure(member.failure)
            return
        link = self._traffic.links.get(peer)
        if link is not None:
            link.resume_s = 0.0  # perhaps it did not know us yet
        self.refusals.add("error reply", f"rank {peer}", f"it answers with an error: {text}")
