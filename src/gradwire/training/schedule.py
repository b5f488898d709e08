"""Learning-rate schedules: a factor for the optimizer's rate at each step. All of them can warm
up, from 1 / warmup linearly to 1 (Goyal et al. 2017, "Accurate, large minibatch SGD", sec. 2.2);
`Cosine` is Loshchilov and Hutter 2017 ("SGDR"), without restarts.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.notation import Expression


class Schedule(Expression, ABC):
    """The course of the learning rate over a run; a factor of one is the optimizer's own."""

    warmup: int

    def factor(self, step: int, total_steps: int) -> float:
        """The factor at `step` = 0 .. total_steps - 1."""
        if not 0 <= step < total_steps:
            raise ValueError(f"step must lie in 0 .. {total_steps - 1}, got {step}")
        ramp = (step + 1) / self.warmup if step < self.warmup else 1.0
        return ramp * self.decay(step, total_steps)

    @abstractmethod
    def decay(self, step: int, total_steps: int) -> float:
        """The factor without warm-up."""

    def _check_warmup(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"a schedule needs warmup >= 0 steps, got {self.warmup}")


@dataclass(frozen=True, repr=False)
class Constant(Schedule):
    """The same learning rate throughout."""

    warmup: int = 0  # steps

    known_as = ("none", "no", "off", "fixed")

    def __post_init__(self) -> None:
        self._check_warmup()

    def decay(self, step: int, total_steps: int) -> float:
        return 1.0


@dataclass(frozen=True, repr=False)
class Step(Schedule):
    """Multiplied by gamma at each milestone: a number of steps, or a fraction of the run."""

    paper: ClassVar[str] = "He et al. 2016, Deep residual learning for image recognition"
    examples = ("step((100, 200))", "step((0.5, 0.75))")
    milestones: tuple[int | float, ...]
    gamma: float = 0.1
    warmup: int = 0  # steps

    def __post_init__(self) -> None:
        self._check_warmup()
        if not self.gamma > 0.0:
            raise ValueError(f"step needs gamma > 0, got {self.gamma}")
        if not all(map(_is_milestone, self.milestones)):
            raise ValueError(
                "step needs milestones in steps, whole numbers from 1, or fractions of the run "
                f"between 0 and 1, got {self.milestones}"
            )

    def decay(self, step: int, total_steps: int) -> float:
        reached = (at if isinstance(at, int) else at * total_steps for at in self.milestones)
        return self.gamma ** sum(step >= milestone for milestone in reached)


def _is_milestone(at: int | float) -> bool:
    return at >= 1 if isinstance(at, int) else 0 < at < 1


@dataclass(frozen=True, repr=False)
class Cosine(Schedule):
    """Half a cosine from 1, at the end of the warm-up, towards `final` at the end of the run."""

    paper: ClassVar[str] = (
        "Loshchilov and Hutter 2017, SGDR: stochastic gradient descent with warm restarts"
    )
    warmup: int = 0  # steps
    final: float = 0.0

    def __post_init__(self) -> None:
        self._check_warmup()
        if not 0.0 <= self.final <= 1.0:
            raise ValueError(f"cosine needs 0 <= final <= 1, got {self.final}")

    def decay(self, step: int, total_steps: int) -> float:
        if step < self.warmup:
            return 1.0
        progress = (step - self.warmup) / (total_steps - self.warmup)
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
