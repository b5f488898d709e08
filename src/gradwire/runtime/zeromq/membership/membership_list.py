"""The list of members that the scheduler keeps, without sockets and with the clock given.

A job is complete when all its servers and workers have asked to join. Workers get ranks in order of
arrival unless they name one. Members from the start have incarnation 0. A node that joins later
gets the rank that it names, or else the lowest lost rank. Its incarnation is the time at which it
joined, in seconds since the scheduler started. The times of changes increase strictly.

A node that names a rank which another one holds waits until the holder has been silent for
`heartbeat_s` or has closed its connections: it may be the same worker, killed and started again.
It is refused if a message of the holder arrives more than `heartbeat_s` after its request.

A worker is lost after `heartbeat_s` without a message. A server is lost if it has not come back
within `server_s`; others keep their messages for it that long. A node that leaves says goodbye to
all others itself. Nodes that its goodbye has not reached by then learn after `server_s` that it is
lost. With `closed_s` a node that has closed its connections, and opens none within so many seconds,
is lost, too.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

from gradwire.core.layout import NodeLayout
from gradwire.runtime.zeromq.messages import (
    MAX_TEXT_NBYTES,
    NOBODY,
    ROLES,
    SERVER,
    WORKER,
    JoinAccepted,
    JoinRequest,
    MemberRecord,
    MembershipEvent,
)

_MAX_EXPELLED = 1024  # identities that are remembered


@dataclass
class _Member:
    identity: bytes
    address: str
    incarnation: float
    time_s: float  # of the last change
    last_message_s: float
    origin: str = ""  # the host from which it connected
    is_there: bool = True
    is_closed: bool = False  # it has closed its connections
    closed_s: float | None = None  # when that was noticed
    has_left: bool = False
    is_announced: bool = False  # the others have been sent an event that it has left


@dataclass
class _Candidate:
    request: JoinRequest
    since_s: float  # of its first request
    last_message_s: float
    origin: str

    incarnation = 0.0

    @property
    def identity(self) -> bytes:
        return self.request.identity


class MembershipList:
    """`events` and `accepted` hold what the scheduler has to send after each call."""

    def __init__(
        self,
        layout: NodeLayout,
        identity: bytes,
        *,
        heartbeat_s: float,
        server_s: float,
        closed_s: float | None = None,
    ) -> None:
        self._layout = layout
        self.events: list[MembershipEvent] = []
        self.accepted: list[int] = []  # ranks
        self._heartbeat_s, self._server_s = heartbeat_s, server_s
        self._closed_s = inf if closed_s is None else closed_s
        self._members: dict[int, _Member] = {}
        self._by_identity: dict[bytes, int] = {}
        self._candidates: dict[bytes, _Candidate] = {}  # in order of arrival
        self._expelled: deque[bytes] = deque(maxlen=_MAX_EXPELLED)
        self._time_s = 0.0
        self._checked_s: float | None = None
        self._scheduler = _Member(identity, "", 0.0, 0.0, inf)

    @property
    def is_complete(self) -> bool:
        return bool(self._members)

    def rank(self, identity: bytes) -> int | None:
        """The rank of a member that is there."""
        return self._by_identity.get(identity)

    def is_waiting(self, identity: bytes) -> bool:
        """Whether this node has asked to join and waits."""
        return identity in self._candidates

    def is_expelled(self, identity: bytes) -> bool:
        return identity in self._expelled

    def identity(self, rank: int) -> bytes:
        return self._members[rank].identity

    def incarnation(self, rank: int) -> float:
        return self._members[rank].incarnation

    def present_ranks(self) -> list[int]:
        return [rank for rank, member in self._members.items() if member.is_there]

    def note_message(self, rank: int, now_s: float) -> None:
        self._members[rank].last_message_s = now_s

    def acceptance(self, rank: int) -> JoinAccepted:
        members = [*sorted(self._members.items()), (self._layout.scheduler, self._scheduler)]
        records = tuple(
            MemberRecord(
                rank=other,
                is_there=one.is_there,
                has_left=one.has_left,
                incarnation=one.incarnation,
                time_s=one.time_s,
                identity=one.identity,
                address=one.address,
            )
            for other, one in members
        )
        incarnation = self._members[rank].incarnation
        return JoinAccepted(rank, incarnation, self._time_s, self._heartbeat_s, records)

    def missing(self) -> str:
        """The nodes for which the job waits."""
        texts = []
        for role in (SERVER, WORKER):
            wanted = len(self._ranks(role))
            there = sum(one.request.role == role for one in self._candidates.values())
            if there < wanted:
                texts.append(f"{there} of {wanted} {ROLES[role]}s are there")
        return ", ".join(texts) or "nobody is missing"

    def note_connection(self, identity: bytes, is_open: bool) -> None:
        """A node has closed its connections, or has a new one."""
        rank = self._by_identity.get(identity)
        if rank is not None:
            self._members[rank].is_closed = not is_open
        elif not is_open:
            self._candidates.pop(identity, None)

    def waiting_reason(self, identity: bytes) -> str:
        """Why a node is not a member yet."""
        candidate = self._candidates.get(identity)
        holder = None if candidate is None else self._holder(candidate)
        if candidate is not None and holder is not None:
            return (
                f"{self._describe(holder, candidate)} and waits until that one has been silent for "
                f"{self._heartbeat_s:g} s or has closed its connection"
            )
        if self.is_complete:
            return "all ranks are taken; it waits until one is lost"
        return self.missing()

    def request_join(self, request: JoinRequest, now_s: float, origin: str = "") -> str | None:
        """A node on the host `origin` asks to join. Returns the reason if it cannot."""
        identity = request.identity
        rank = self._by_identity.get(identity)
        if rank is not None:
            self.note_message(rank, now_s)
            self.accepted.append(rank)  # the first answer has not arrived
            return None
        if identity in self._expelled:
            return "another process has taken its place, or it was silent for too long"
        problem = self._problem(request)
        if problem is not None:
            return problem
        if identity not in self._candidates and len(self._candidates) > 4 * self._layout.size:
            return "too many others wait to join"
        candidate = self._candidates.setdefault(identity, _Candidate(request, now_s, now_s, origin))
        candidate.last_message_s = now_s
        self._admit(now_s)
        holder = self._holder(candidate) if identity in self._candidates else None
        if holder is None or holder.last_message_s - candidate.since_s <= self._heartbeat_s:
            return None
        del self._candidates[identity]
        return (
            f"{self._describe(holder, candidate)}. The first one is alive: stop it, or give this "
            "one another --number, or none"
        )

    def _problem(self, request: JoinRequest) -> str | None:
        if request.role not in (WORKER, SERVER):
            return f"there is no role {request.role}"
        if len(request.address) > MAX_TEXT_NBYTES:
            return f"its address has {len(request.address)} characters"
        expected = (self._layout.num_workers, self._layout.num_servers)
        if (request.num_workers, request.num_servers) != expected:
            return (
                f"it is of a job with {request.num_workers} workers and {request.num_servers} "
                f"servers; this one has {expected[0]} and {expected[1]}"
            )
        ranks = self._ranks(request.role)
        if request.wanted != NOBODY and request.wanted not in ranks:
            return (
                f"a {ROLES[request.role]} asks for rank {request.wanted}; their ranks are "
                f"{ranks.start} .. {ranks.stop - 1}"
            )
        return None

    def note_left(self, rank: int, now_s: float) -> None:
        """The member said goodbye."""
        member = self._members[rank]
        if member.is_there:
            self._remove(rank)
            member.has_left, member.time_s = True, self._tick(now_s)

    def check(self, now_s: float) -> None:
        """Finds members that have been silent for too long.

        If this was not called for a while, the scheduler itself was suspended; all others get that
        time as an extension.
        """
        slept = 0.0 if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        if slept > self._heartbeat_s / 2:
            for member in self._members.values():
                member.last_message_s += slept
            for one in self._candidates.values():
                one.since_s, one.last_message_s = one.since_s + slept, one.last_message_s + slept
        for identity, one in list(self._candidates.items()):
            if now_s - one.last_message_s > self._heartbeat_s:
                del self._candidates[identity]
        for rank, member in self._members.items():
            limit = self._heartbeat_s if self._layout.is_worker(rank) else self._server_s
            if not member.is_closed:
                member.closed_s = None
            elif member.closed_s is None:
                member.closed_s = now_s
            if member.is_there and now_s - member.last_message_s > limit:
                self._lose(rank, now_s, f"nothing was received from it for {limit:g} s")
            elif member.is_there and now_s - (member.closed_s or now_s) > self._closed_s:
                self._lose(rank, now_s, "its connections are closed")
            # Its goodbye may not have reached a node that would wait for it.
            is_overdue = now_s - member.time_s > self._server_s
            if member.has_left and not member.is_announced and is_overdue:
                member.is_announced = True
                reason = "it left, and its last messages have not arrived"
                self._add_loss(rank, self._tick(now_s), member.identity, reason)
        self._admit(now_s)

    def _ranks(self, role: int) -> range:
        return self._layout.workers if role == WORKER else self._layout.servers

    def _holder(self, candidate: _Candidate) -> "_Member | _Candidate | None":
        """The node that has the rank which this one names, or that named it before."""
        wanted = candidate.request.wanted
        if wanted == NOBODY:
            return None
        member = self._members.get(wanted)
        if member is not None and member.is_there:
            return member
        first = next(one for one in self._candidates.values() if one.request.wanted == wanted)
        return None if first is candidate else first

    def _describe(self, holder: "_Member | _Candidate", candidate: _Candidate) -> str:
        request = candidate.request
        name = f"{ROLES[request.role]} {request.wanted - self._ranks(request.role).start}"
        return (
            f"{name} is process {holder.identity.hex()[2:10]} at {holder.origin or 'this host'} "
            f"(incarnation {holder.incarnation:g}); process {candidate.identity.hex()[2:10]} at "
            f"{candidate.origin or 'this host'} asks for the same rank"
        )

    def _tick(self, now_s: float) -> float:
        self._time_s = max(now_s, self._time_s + 1e-6)
        return self._time_s

    def _expel(self, identity: bytes) -> None:
        self._candidates.pop(identity, None)
        self._expelled.append(identity)

    def _remove(self, rank: int) -> None:
        member = self._members[rank]
        member.is_there = False
        del self._by_identity[member.identity]

    def _lose(self, rank: int, now_s: float, reason: str) -> None:
        member = self._members[rank]
        self._remove(rank)
        self._expel(member.identity)
        member.time_s = self._tick(now_s)
        self._add_loss(rank, member.time_s, member.identity, reason)

    def _add_loss(self, rank: int, time_s: float, identity: bytes, reason: str) -> None:
        self.events.append(MembershipEvent(False, rank, time_s, identity, reason))

    def _admit(self, now_s: float) -> None:
        if self.is_complete:
            for candidate in list(self._candidates.values()):
                self._admit_late(candidate, now_s)
            return
        chosen: dict[int, _Candidate] = {}
        for role in (SERVER, WORKER):
            ones = [one for one in self._candidates.values() if one.request.role == role]
            # The first node that asked for a rank gets it.
            named = {one.request.wanted: one for one in reversed(ones)}
            others = iter([one for one in ones if one.request.wanted == NOBODY])
            for rank in self._ranks(role):
                one = named.get(rank) or next(others, None)
                if one is None:
                    return
                chosen[rank] = one
        for rank, one in sorted(chosen.items()):
            self._enter(rank, one, 0.0, now_s)

    def _admit_late(self, candidate: _Candidate, now_s: float) -> None:
        request = candidate.request
        if request.wanted != NOBODY:
            rank, member = request.wanted, self._members[request.wanted]
            if member.is_there and not (member.is_closed or self._is_silent(rank, now_s)):
                return
        else:
            free = [
                rank
                for rank in self._ranks(request.role)
                if not self._members[rank].is_there or self._is_silent(rank, now_s)
            ]
            if not free:
                return
            rank = free[0]
        if self._members[rank].is_there:
            if self._layout.is_worker(rank):
                self._lose(rank, now_s, "it is gone, and another process has taken its place")
            else:
                # The others keep their messages for it: it is the same server, started again.
                identity = self._members[rank].identity
                self._remove(rank)
                self._expel(identity)
        time_s = self._tick(now_s)
        self._enter(rank, candidate, time_s, now_s)
        event = MembershipEvent(True, rank, time_s, request.identity, request.address)
        self.events.append(event)

    def _is_silent(self, rank: int, now_s: float) -> bool:
        """Whether this is a server that is silent, and that others still wait for."""
        silent = now_s - self._members[rank].last_message_s > self._heartbeat_s
        return self._layout.is_server(rank) and silent

    def _enter(self, rank: int, candidate: _Candidate, incarnation: float, now_s: float) -> None:
        request = candidate.request
        del self._candidates[request.identity]
        self._members[rank] = _Member(
            request.identity, request.address, incarnation, incarnation, now_s, candidate.origin
        )
        self._by_identity[request.identity] = rank
        self.accepted.append(rank)
