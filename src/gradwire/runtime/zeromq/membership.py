"""Who is in the job: what the scheduler keeps, without sockets and with the clock given.

A job is complete when all its servers and workers have said hello. Workers get ranks in order of
arrival unless they name one; who was there then has a life of 0. Who comes later takes the rank
that it names or else the lowest of a lost one, and its life is the time of that, in seconds since
the scheduler began. All times of changes increase strictly.

A node that names a rank which another one holds waits until that one has been silent for
`heartbeat_s` or has closed its connections: it may be the same worker, killed and started again.
It is refused if the holder is alive, that is, was heard so long after it asked.

A worker is lost when nothing was heard of it for `heartbeat_s`, a server when it has not come back
for `server_s`: what others have for it waits that long. Who leaves tells all others itself; so long
after that it is lost to those whom this has not reached.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

from gradwire.runtime.zeromq.messages import (
    HAS_JOINED,
    IS_LOST,
    NOBODY,
    ROLES,
    SERVER,
    WORKER,
    Entry,
    Event,
    Hello,
    Welcome,
)

_NUM_EXPELLED = 1024


@dataclass
class _Member:
    identity: bytes
    address: str
    life: float
    time_s: float  # of the last change
    heard_s: float
    origin: str = ""  # the host from which it connected
    is_there: bool = True
    is_closed: bool = False  # whether it has closed its connections
    has_left: bool = False
    is_told: bool = False  # whether all have been told that it has left


@dataclass
class _Candidate:
    hello: Hello
    since_s: float  # when it asked first
    heard_s: float
    origin: str

    life = 0.0

    @property
    def identity(self) -> bytes:
        return self.hello.identity


class Registry:
    """Call `hello`, `heard`, `left`, `connection` and `check`; take `events` and `welcomes`."""

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        identity: bytes,
        *,
        heartbeat_s: float,
        server_s: float,
    ) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self.size = num_workers + num_servers + 1
        self.events: list[Event] = []
        self.welcomes: list[int] = []  # ranks
        self._heartbeat_s, self._server_s = heartbeat_s, server_s
        self._members: dict[int, _Member] = {}
        self._by_identity: dict[bytes, int] = {}
        self._candidates: dict[bytes, _Candidate] = {}  # in order of arrival
        self._expelled: deque[bytes] = deque(maxlen=_NUM_EXPELLED)
        self._time_s = 0.0
        self._checked_s: float | None = None
        self._scheduler = _Member(identity, "", 0.0, 0.0, inf)

    @property
    def is_complete(self) -> bool:
        return bool(self._members)

    def rank(self, identity: bytes) -> int | None:
        """Of a member that is there."""
        return self._by_identity.get(identity)

    def waits(self, identity: bytes) -> bool:
        """Whether this node has said hello and waits to join."""
        return identity in self._candidates

    def is_expelled(self, identity: bytes) -> bool:
        return identity in self._expelled

    def identity(self, rank: int) -> bytes:
        return self._members[rank].identity

    def life(self, rank: int) -> float:
        return self._members[rank].life

    def there(self) -> list[int]:
        return [rank for rank, member in self._members.items() if member.is_there]

    def heard(self, rank: int, now_s: float) -> None:
        self._members[rank].heard_s = now_s

    def welcome(self, rank: int) -> Welcome:
        entries = tuple(
            Entry(
                other, one.is_there, one.has_left, one.life, one.time_s, one.identity, one.address
            )
            for other, one in [*sorted(self._members.items()), (self.size - 1, self._scheduler)]
        )
        life = self._members[rank].life
        return Welcome(rank, life, self._time_s, self._heartbeat_s, entries)

    def missing(self) -> str:
        """For whom the job waits."""
        texts = []
        for role, wanted in ((SERVER, self.num_servers), (WORKER, self.num_workers)):
            there = sum(one.hello.role == role for one in self._candidates.values())
            if there < wanted:
                texts.append(f"{there} of {wanted} {ROLES[role]}s are there")
        return ", ".join(texts) or "nobody is missing"

    def connection(self, identity: bytes, is_open: bool) -> None:
        """A node has closed its connections, or has a new one."""
        rank = self._by_identity.get(identity)
        if rank is not None:
            self._members[rank].is_closed = not is_open
        elif not is_open:
            self._candidates.pop(identity, None)

    def waits_for(self, identity: bytes) -> str:
        """For what a node waits that is no member yet."""
        candidate = self._candidates.get(identity)
        holder = None if candidate is None else self._holder(candidate)
        if candidate is not None and holder is not None:
            return (
                f"{self._held(holder, candidate)} and waits until that one has been silent for "
                f"{self._heartbeat_s:g} s or has closed its connection"
            )
        if self.is_complete:
            return "all ranks are taken; it waits until one is lost"
        return self.missing()

    def hello(self, hello: Hello, now_s: float, origin: str = "") -> str | None:
        """A node on this host wants to join. A text if it cannot."""
        identity = hello.identity
        rank = self._by_identity.get(identity)
        if rank is not None:
            self.heard(rank, now_s)
            self.welcomes.append(rank)  # it has not heard
            return None
        if identity in self._expelled:
            return "another process has taken its place, or it was silent for too long"
        if (hello.num_workers, hello.num_servers) != (self.num_workers, self.num_servers):
            return (
                f"it is of a job with {hello.num_workers} workers and {hello.num_servers} servers; "
                f"this one has {self.num_workers} and {self.num_servers}"
            )
        ranks = self._ranks(hello.role)
        if hello.wanted != NOBODY and hello.wanted not in ranks:
            return (
                f"a {ROLES[hello.role]} asks for rank {hello.wanted}; their ranks are "
                f"{ranks.start} .. {ranks.stop - 1}"
            )
        if identity not in self._candidates and len(self._candidates) > 4 * self.size:
            return "too many others wait to join"
        candidate = self._candidates.setdefault(identity, _Candidate(hello, now_s, now_s, origin))
        candidate.heard_s = now_s
        self._admit(now_s)
        holder = self._holder(candidate) if identity in self._candidates else None
        if holder is None or holder.heard_s - candidate.since_s <= self._heartbeat_s:
            return None
        del self._candidates[identity]
        return (
            f"{self._held(holder, candidate)}. The first one is alive: stop it, or give this one "
            "another --number, or none"
        )

    def left(self, rank: int, now_s: float) -> None:
        """It said goodbye."""
        member = self._members[rank]
        if member.is_there:
            self._remove(rank)
            member.has_left, member.time_s = True, self._tick(now_s)

    def check(self, now_s: float) -> None:
        """Who has been silent for too long?

        If nobody has asked for a while, it is this process that slept: the others are given that
        time.
        """
        slept = 0.0 if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        if slept > self._heartbeat_s / 2:
            for member in self._members.values():
                member.heard_s += slept
            for one in self._candidates.values():
                one.since_s, one.heard_s = one.since_s + slept, one.heard_s + slept
        for identity, one in list(self._candidates.items()):
            if now_s - one.heard_s > self._heartbeat_s:
                del self._candidates[identity]
        for rank, member in self._members.items():
            limit = self._heartbeat_s if rank < self.num_workers else self._server_s
            if member.is_there and now_s - member.heard_s > limit:
                self._lose(rank, now_s, f"nothing was heard of it for {limit:g} s")
            # Its goodbye may not have reached somebody, who would wait for it.
            if member.has_left and not member.is_told and now_s - member.time_s > self._server_s:
                member.is_told = True
                reason = "it left, and its last messages have not arrived"
                event = Event(IS_LOST, rank, self._tick(now_s), member.identity, reason)
                self.events.append(event)
        self._admit(now_s)

    def _ranks(self, role: int) -> range:
        return range(self.num_workers) if role == WORKER else range(self.num_workers, self.size - 1)

    def _holder(self, candidate: _Candidate) -> "_Member | _Candidate | None":
        """Who has the rank that this one names, or named it before."""
        wanted = candidate.hello.wanted
        if wanted == NOBODY:
            return None
        member = self._members.get(wanted)
        if member is not None and member.is_there:
            return member
        first = next(one for one in self._candidates.values() if one.hello.wanted == wanted)
        return None if first is candidate else first

    def _held(self, holder: "_Member | _Candidate", candidate: _Candidate) -> str:
        hello = candidate.hello
        name = f"{ROLES[hello.role]} {hello.wanted - self._ranks(hello.role).start}"
        return (
            f"{name} is process {holder.identity.hex()[2:10]} at {holder.origin or 'this host'} "
            f"(incarnation {holder.life:g}); process {candidate.identity.hex()[2:10]} at "
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
        self.events.append(Event(IS_LOST, rank, member.time_s, member.identity, reason))

    def _admit(self, now_s: float) -> None:
        if self.is_complete:
            for candidate in list(self._candidates.values()):
                self._admit_late(candidate, now_s)
            return
        chosen: dict[int, Hello] = {}
        for role in (SERVER, WORKER):
            hellos = [one.hello for one in self._candidates.values() if one.hello.role == role]
            # Who asked for a rank first gets it.
            named = {hello.wanted: hello for hello in reversed(hellos) if hello.wanted != NOBODY}
            others = iter([hello for hello in hellos if hello.wanted == NOBODY])
            for rank in self._ranks(role):
                hello = named.get(rank) or next(others, None)
                if hello is None:
                    return
                chosen[rank] = hello
        for rank, hello in sorted(chosen.items()):
            self._enter(rank, self._candidates[hello.identity], 0.0, 0.0, now_s)

    def _admit_late(self, candidate: _Candidate, now_s: float) -> None:
        hello = candidate.hello
        if hello.wanted != NOBODY:
            rank, member = hello.wanted, self._members[hello.wanted]
            if member.is_there and not (member.is_closed or self._is_silent(rank, now_s)):
                return
        else:
            free = [
                rank
                for rank in self._ranks(hello.role)
                if not self._members[rank].is_there or self._is_silent(rank, now_s)
            ]
            if not free:
                return
            rank = free[0]
        if self._members[rank].is_there:
            if rank < self.num_workers:
                self._lose(rank, now_s, "it is gone, and another process has taken its place")
            else:
                # The others keep what they have for it: it is the same server, begun again.
                identity = self._members[rank].identity
                self._remove(rank)
                self._expel(identity)
        life = self._tick(now_s)
        self._enter(rank, candidate, life, life, now_s)
        self.events.append(Event(HAS_JOINED, rank, life, hello.identity, hello.address))

    def _is_silent(self, rank: int, now_s: float) -> bool:
        """Of a server that others still wait for."""
        silent = now_s - self._members[rank].heard_s > self._heartbeat_s
        return rank >= self.num_workers and silent

    def _enter(
        self, rank: int, candidate: _Candidate, life: float, time_s: float, now_s: float
    ) -> None:
        hello = candidate.hello
        del self._candidates[hello.identity]
        self._members[rank] = _Member(
            hello.identity, hello.address, life, time_s, now_s, candidate.origin
        )
        self._by_identity[hello.identity] = rank
        self.welcomes.append(rank)
