"""How long a gradient takes in virtual time: measured, fixed, or drawn from a distribution.

Every draw is keyed by step and rank, so a run can be repeated and resumed exactly. Node speeds
multiply the base time; stragglers multiply it again at random or always.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from gradwire.core.key import Key
from gradwire.core.notation import Expression
from gradwire.core.registry import Registry


class ComputeTime(Expression, ABC):
    """Seconds per gradient on a node of speed 1."""

    @abstractmethod
    def sample(self, key: Key) -> float: ...

    def of(self, rank: int) -> "ComputeTime":
        """The distribution of one worker."""
        return self

    def check(self, num_workers: int) -> None:
        """Refuses distributions for another number of workers."""


def _check_finite(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a finite number >= 0, got {value}")


@dataclass(frozen=True, repr=False)
class Fixed(ComputeTime):
    """Every gradient takes the same time."""

    seconds: float

    examples = ("fixed(0.01)",)

    def __post_init__(self) -> None:
        _check_finite("fixed: seconds", self.seconds)

    def sample(self, key: Key) -> float:
        return self.seconds


@dataclass(frozen=True, repr=False)
class Measured(ComputeTime):
    """The time one gradient takes on this machine; measured once, then fixed and recorded."""

    def sample(self, key: Key) -> float:
        raise AssertionError("`measured` is replaced by what was measured before a run starts")


@dataclass(frozen=True, repr=False)
class Uniform(ComputeTime):
    """Uniform between two times."""

    low: float
    high: float

    examples = ("uniform(0.01, high=0.02)",)

    def __post_init__(self) -> None:
        _check_finite("uniform: low", self.low)
        _check_finite("uniform: high", self.high)
        if self.high < self.low:
            raise ValueError(f"uniform: high {self.high} is below low {self.low}")

    def sample(self, key: Key) -> float:
        return self.low + (self.high - self.low) * float(key.uniform64(1))


@dataclass(frozen=True, repr=False)
class Exponential(ComputeTime):
    """A fixed part and an exponential one (Dutta et al. 2018: shifted exponential)."""

    mean: float  # of the whole
    shift: float = 0.0  # the least it takes

    examples = ("exponential(0.01)", "exponential(0.01, shift=0.005)")

    def __post_init__(self) -> None:
        _check_finite("exponential: mean", self.mean)
        _check_finite("exponential: shift", self.shift)
        if self.mean < self.shift:
            raise ValueError(f"exponential: mean {self.mean} is below shift {self.shift}")

    def sample(self, key: Key) -> float:
        return self.shift - (self.mean - self.shift) * math.log1p(-float(key.uniform64(1)))


@dataclass(frozen=True, repr=False)
class Lognormal(ComputeTime):
    """Log-normal with the given mean; sigma is the deviation of the logarithm."""

    mean: float
    sigma: float = 0.3

    examples = ("lognormal(0.01, sigma=0.5)",)

    def __post_init__(self) -> None:
        _check_finite("lognormal: mean", self.mean)
        _check_finite("lognormal: sigma", self.sigma)

    def sample(self, key: Key) -> float:
        normal = float(key.normal(1))
        return self.mean * math.exp(self.sigma * normal - self.sigma**2 / 2)


@dataclass(frozen=True, repr=False)
class PerNode(ComputeTime):
    """Each worker has a distribution of its own."""

    times: tuple[ComputeTime, ...]

    examples = ("per_node((fixed(0.01), lognormal(0.02)))",)

    def __post_init__(self) -> None:
        for time in self.times:
            if isinstance(time, Measured | PerNode):
                raise ValueError(
                    f"per_node: {time!r} cannot be the time of one worker; write fixed, uniform, "
                    "exponential or lognormal"
                )

    def sample(self, key: Key) -> float:
        raise AssertionError("ask for the distribution `of` a worker")

    def of(self, rank: int) -> ComputeTime:
        return self.times[rank]

    def check(self, num_workers: int) -> None:
        if len(self.times) != num_workers:
            raise ValueError(
                f"{self!r} has {len(self.times)} distributions for {num_workers} workers: "
                "give one for each"
            )


class Stragglers(Expression, ABC):
    """Which nodes are slow, and when."""

    def check(self, num_nodes: int) -> None:
        """Refuses stragglers that do not exist."""

    @abstractmethod
    def factor(self, rank: int, key: Key) -> float:
        """What the compute time of this rank in this step is multiplied by."""


@dataclass(frozen=True, repr=False)
class Nobody(Stragglers):
    """Nobody is slow."""

    known_as = ("none", "no", "off")

    def factor(self, rank: int, key: Key) -> float:
        return 1.0


@dataclass(frozen=True, repr=False)
class Sometimes(Stragglers):
    """Any node is slow in any step with the given probability."""

    probability: float
    slowdown: float = 5.0

    examples = ("sometimes(0.1, slowdown=5.0)",)

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"sometimes: probability must lie in 0 .. 1, got {self.probability}")
        _check_finite("sometimes: slowdown", self.slowdown)

    def factor(self, rank: int, key: Key) -> float:
        return self.slowdown if float(key.uniform64(1)) < self.probability else 1.0


@dataclass(frozen=True, repr=False)
class Always(Stragglers):
    """The given ranks are slow in every step."""

    ranks: tuple[int, ...]
    slowdown: float = 5.0

    examples = ("always((0, 3), slowdown=2.0)",)

    def __post_init__(self) -> None:
        _check_finite("always: slowdown", self.slowdown)

    def check(self, num_nodes: int) -> None:
        if not all(0 <= rank < num_nodes for rank in self.ranks):
            raise ValueError(f"{self!r}: ranks are 0 .. {num_nodes - 1}")

    def factor(self, rank: int, key: Key) -> float:
        return self.slowdown if rank in self.ranks else 1.0


COMPUTE_TIME: Registry[ComputeTime] = Registry(
    "compute time",
    ComputeTime,  # type: ignore[type-abstract]
    __name__,
    group="gradwire.compute",
)
STRAGGLERS: Registry[Stragglers] = Registry(
    "stragglers",
    Stragglers,  # type: ignore[type-abstract]
    __name__,
    group="gradwire.stragglers",
)


@dataclass(frozen=True)
class Computer:
    """Compute times of all nodes: base time, times stragglers, divided by each node's speed."""

    base: ComputeTime
    stragglers: Stragglers
    speeds: tuple[float, ...]
    key: Key

    def __post_init__(self) -> None:
        self.base.check(len(self.speeds))

    def seconds(self, rank: int, step: int) -> float:
        key = self.key.at(step).private(rank)
        base = self.base.of(rank).sample(key.child("compute"))
        slow = self.stragglers.factor(rank, key.child("straggler"))
        return base * slow / self.speeds[rank]
