"""What goes wrong, and when: workers that crash, come back or come late, messages that get lost.

Times are absolute virtual times, so a fault happens once, in whichever segment of a run its time
comes. `runtime/network/outages.py` keeps track of the workers that are there,
`runtime/network/links.py` of lost messages.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradwire.core.notation import Expression
from gradwire.core.registry import Registry


class Fault(Expression, ABC):
    """Something that goes wrong."""

    @abstractmethod
    def check(self, num_workers: int) -> None:
        """Refuses a fault of a worker that does not exist."""


def _check_time(name: str, seconds: float) -> None:
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"{name} must be a finite number of seconds >= 0, got {seconds}")


def _check_rank(fault: Fault, rank: int, num_workers: int) -> None:
    if not 0 <= rank < num_workers:
        raise ValueError(
            f"{fault!r}: there is no worker {rank}; workers are 0 .. {num_workers - 1}"
        )


@dataclass(frozen=True, repr=False)
class Crash(Fault):
    """A worker stops at a time and loses all it held; it may come back later."""

    rank: int
    at: float
    rejoin: float | None = None

    examples = ("crash(2, at=1.5)", "crash(0, at=1.5, rejoin=4.0)")

    def __post_init__(self) -> None:
        _check_time("crash: at", self.at)
        if self.rejoin is not None:
            _check_time("crash: rejoin", self.rejoin)
            if self.rejoin <= self.at:
                raise ValueError(
                    f"crash: rejoin {self.rejoin} must come after the crash at {self.at}"
                )

    def check(self, num_workers: int) -> None:
        _check_rank(self, self.rank, num_workers)


@dataclass(frozen=True, repr=False)
class Arrive(Fault):
    """A worker is not there from the start but comes at a time."""

    rank: int
    at: float

    examples = ("arrive(3, at=2.0)",)

    def __post_init__(self) -> None:
        _check_time("arrive: at", self.at)

    def check(self, num_workers: int) -> None:
        _check_rank(self, self.rank, num_workers)


@dataclass(frozen=True, repr=False)
class Loss(Fault):
    """Every message is lost with a probability, and sent again after a timeout, as TCP does."""

    probability: float
    timeout: float = 0.01

    examples = ("loss(0.01)", "loss(0.1, timeout=0.2)")

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise ValueError(
                f"loss: probability must be at least 0 and below 1, got {self.probability}"
            )
        _check_time("loss: timeout", self.timeout)

    def check(self, num_workers: int) -> None:
        pass


FAULTS = Registry("fault", Fault, __name__, group="gradwire.faults")  # type: ignore[type-abstract]


def parse_faults(faults: Iterable[str | Fault], num_workers: int) -> tuple[Fault, ...]:
    """The faults that are written, if they can all happen."""
    parsed = tuple(FAULTS.parse(fault) for fault in faults)
    for fault in parsed:
        fault.check(num_workers)
    losses = [fault for fault in parsed if isinstance(fault, Loss)]
    if len(losses) > 1:
        raise ValueError(f"{losses[0]!r} and {losses[1]!r}: give one loss for all messages")
    arrivals = {fault.rank for fault in parsed if isinstance(fault, Arrive)}
    if len(arrivals) == num_workers:
        raise ValueError(
            "every worker arrives later: one at least must be there from the start, "
            "to hold the model"
        )
    for rank in range(num_workers):
        _check_history(
            [fault for fault in parsed if isinstance(fault, Crash | Arrive) and fault.rank == rank]
        )
    return parsed


def _check_history(faults: Sequence[Crash | Arrive]) -> None:
    """Refuses a crash of a worker that is not there, and an arrival of one that is."""
    # Of two at the same time the arrival is first: it is the crash that then comes too early.
    ordered = sorted(faults, key=lambda fault: (fault.at, isinstance(fault, Crash)))
    for earlier, later in pairwise(ordered):
        if isinstance(later, Arrive):
            raise ValueError(
                f"{earlier!r} and {later!r} contradict each other: a worker arrives once and "
                "before it crashes; write when it comes back as crash(..., rejoin=...)"
            )
        back = earlier.at if isinstance(earlier, Arrive) else earlier.rejoin
        if back is None or later.at <= back:
            raise ValueError(
                f"{earlier!r} and {later!r} contradict each other: worker {later.rank} is not "
                f"there at {later.at:g} s"
            )
