"""What comes from the sockets of a node: checked, and handed to who it is for.

Messages come to our binding socket from anybody, or from a peer that we connected to. Nothing in
them is trusted before it is checked. What should not be is counted, answered with an error, and
dropped.
"""

from collections.abc import Callable
from typing import Any

from gradwire.core.errors import WireError
from gradwire.runtime.zeromq import identities
from gradwire.runtime.zeromq import messages as msg
from gradwire.runtime.zeromq.arrivals import BLOCK_NBYTES
from gradwire.runtime.zeromq.members import Desk, Member
from gradwire.runtime.zeromq.messages import Header
from gradwire.runtime.zeromq.place import Place
from gradwire.runtime.zeromq.refusals import Refusal, Refusals
from gradwire.runtime.zeromq.sockets import CONNECTED, TURNED_AWAY
from gradwire.runtime.zeromq.traffic import Traffic
from gradwire.runtime.zeromq.wire import Wire


class Reception:
    """Of one node. `on_failure` is told why this node cannot go on, if the scheduler says so."""

    def __init__(
        self,
        place: Place,
        wire: Wire,
        members: Desk | Member,
        traffic: Traffic,
        *,
        heartbeat_s: float,
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.refusals = Refusals(place.role_name)
        self._place, self._wire, self._members, self._traffic = place, wire, members, traffic
        self._desk = members if isinstance(members, Desk) else None
        self._member = members if isinstance(members, Member) else None
        self._heartbeat_s = heartbeat_s
        self._on_failure = on_failure

    def open(self) -> None:
        """From now on who connects to us is heard."""
        self._wire.serve(self.take)

    def connect(self, peer: int, address: str) -> None:
        self._wire.connect(peer, address, self.take, self.changed)
        if peer == self._place.scheduler:
            self._wire.connect_for_beats(peer, address, self.take)

    def changed(self, peer: int, change: int) -> None:
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
                self._member.heard = (
                    "it turns us away, or does not answer in time. Do all nodes have the same keys?"
                )

    def take(self, identity: bytes | None, peer: int, parts: list[Any]) -> None:
        """A message came, to our binding socket or from a peer that we connected to."""
        try:
            self._take(identity, peer, parts)
        except WireError as error:
            self._refuse(identity, peer, error)

    def _refuse(self, identity: bytes | None, peer: int, error: WireError) -> None:
        """Counts it, and tells the peer."""
        reason, code = "malformed", msg.REFUSED
        if isinstance(error, Refusal):
            reason, code = error.reason, error.code
        who = f"rank {peer}"
        if identity is not None:
            known = self._traffic.by_identity.get(self._node(identity))
            stranger = f"a node that is not in the job ({identity.hex()[2:10]})"
            who = stranger if known is None else f"rank {known}"
        self.refusals.add(reason, who, str(error))
        head = self._place.header(msg.ERROR, code=code)
        self._wire.put(identity, peer, head, msg.pack_text(str(error)))

    def _take(self, identity: bytes | None, peer: int, parts: list[Any]) -> None:
        if not parts:
            raise Refusal("oversized", "a part of a message is too long, or has no end")
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
                "job",
                "it is of another job: it has other settings, or another version of gradwire. All "
                "nodes of a job take the same settings, or the same --config FILE",
                msg.CANNOT_JOIN,
            )
        if len(parts) != (3 if kind == msg.DATA and header.nbytes else 2):
            raise Refusal("malformed", f"kind {kind} in {len(parts)} parts")
        if len(parts[1]) > BLOCK_NBYTES:
            raise Refusal("oversized", f"a body of {len(parts[1])} bytes")
        if kind == msg.HELLO:
            if self._desk is None or identity is None:
                raise Refusal("state", "only the scheduler lets others in", msg.CANNOT_JOIN)
            origin = parts[0].get("Peer-Address")
            self._desk.take_hello(identity, msg.unpack_hello(parts[1].bytes), origin)
            return
        if identity is not None:
            node = self._node(identity)
            if node in self._members.departed:  # its last words
                if kind == msg.RESUME and node == identity:
                    self._answer_departed(identity, header.src)
                return
            peer = self._peer(node, header)
            self._wire.is_member(identity, parts[0])
            if node != identity and kind != msg.BEAT:
                raise Refusal("state", f"kind {kind} over a connection for beats")
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

    def _answer_departed(self, identity: bytes, peer: int) -> None:
        """It waits until it knows that its goodbye has arrived, which was its last message."""
        place, taken = self._place, self._members.departed[identity]
        head = Header(msg.RESUMED, place.job, place.rank, peer, 1, 0, taken, taken, taken).pack()
        body = msg.pack_resume(msg.Resume(place.life, False, -1.0))
        self._wire.put(identity, peer, head, body)

    def _node(self, identity: bytes) -> bytes:
        """Whose connection this is. The scheduler knows two of each."""
        node = identities.whose_beats(identity) if self._desk is not None else None
        return identity if node is None else node

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
        raise Refusal("unknown peer", "it has not joined this job, or has connected anew since")

    def _check_ends(self, peer: int, header: Header) -> None:
        """Only the scheduler hands on what is from others, and gets what is for others."""
        is_data = header.kind == msg.DATA
        if header.src != peer and not (is_data and peer == self._place.scheduler):
            raise Refusal("source", f"rank {peer} says that it is rank {header.src}")
        is_ours = header.dst in (self._place.rank, msg.NOBODY)
        if not is_ours and not (is_data and self._place.is_scheduler):
            raise Refusal("destination", f"a message for rank {header.dst}")

    def _take_error(self, peer: int, code: int, text: str) -> None:
        member = self._member
        if member is not None and peer == self._place.scheduler and member.take_error(code, text):
            assert member.failure is not None
            self._on_failure(member.failure)
            return
        link = self._traffic.links.get(peer)
        if link is not None:
            link.resume_s = 0.0  # perhaps it did not know us yet
        self.refusals.add("error reply", f"rank {peer}", f"it answers with an error: {text}")
