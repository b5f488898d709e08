"""Which workers are there, which are believed to be there, and which faults are to come.

A crash is noticed `heartbeat_s` after it, or when the worker comes back, if that is earlier. So a
worker may be gone and still be a member. One that arrives later is no member until it does.
"""

import math
from collections.abc import Sequence
from typing import Any

from gradwire.core.errors import PeerLost
from gradwire.runtime.network.faults import Arrive, Crash, Fault

CRASH, NOTICE, RETURN = "crash", "notice", "return"
Outage = tuple[float, str, int]  # when, what, to which rank


class Outages:
    """The workers' comings and goings. An engine carries them out and says so here."""

    def __init__(self, faults: Sequence[Fault], num_workers: int, heartbeat_s: float) -> None:
        if not (heartbeat_s >= 0 and math.isfinite(heartbeat_s)):
            raise ValueError(f"heartbeat_s must be a finite number >= 0, got {heartbeat_s}")
        self.heartbeat_s = heartbeat_s
        self.pending: list[Outage] = []  # has not happened, in any order
        self.gone: dict[int, float | None] = {}  # when it crashed; None: has not arrived
        self.lost: dict[int, float] = {}  # those of them of whom it is known, since when
        for fault in faults:
            if isinstance(fault, Crash):
                self.pending.append((fault.at, CRASH, fault.rank))
                if fault.rejoin is not None:
                    self.pending.append((fault.rejoin, RETURN, fault.rank))
            elif isinstance(fault, Arrive):
                self.pending.append((fault.at, RETURN, fault.rank))
                self.gone[fault.rank] = None
                self.lost[fault.rank] = 0.0
        self._workers = frozenset(range(num_workers))
        self.members = self._workers.difference(self.lost)

    @property
    def alive(self) -> frozenset[int]:
        return self._workers.difference(self.gone)

    @property
    def returns(self) -> bool:
        """Whether a worker will come (back)."""
        return any(what == RETURN for _, what, _ in self.pending)

    def crash(self, rank: int, now: float) -> Outage:
        """The worker is gone; returns when that will be noticed."""
        self.gone[rank] = now
        notice = (now + self.heartbeat_s, NOTICE, rank)
        self.pending.append(notice)
        return notice

    def notice(self, rank: int, now: float) -> None:
        """From now on it is known that the worker is gone."""
        self.lost[rank] = now
        self.members -= {rank}
        self.pending = [event for event in self.pending if event[1:] != (NOTICE, rank)]

    def come_back(self, rank: int) -> None:
        del self.gone[rank], self.lost[rank]
        self.members |= {rank}

    def error(self, rank: int) -> PeerLost:
        """The error for a program that waits for a lost worker."""
        return PeerLost(rank, self.gone[rank], self.lost[rank])

    def snapshot(self) -> dict[str, Any]:
        return {"pending": list(self.pending), "gone": dict(self.gone), "lost": dict(self.lost)}

    def restore(self, saved: dict[str, Any]) -> None:
        self.pending = [(at, what, rank) for at, what, rank in saved["pending"]]
        for mine, others in ((self.gone, saved["gone"]), (self.lost, saved["lost"])):
            mine.clear()  # engines hold these dictionaries
            mine.update(others)
        self.members = self._workers.difference(self.lost)
