"""Numbers that change with time: `topk(ramp(0.25, 0.001, epochs=4))`.

A ramp may stand wherever the notation has a number. It is one itself, its first value, so that
expressions with it are built and checked like all others; before each step `at` puts the value of
that step in its place. All ranks know the step, so nothing is sent for it.

DGC's warm-up (Lin et al. 2018, sec. 3.3) keeps 25%, 6.25%, 1.56%, 0.4% in the first four epochs and
0.1% from then on: `ramp(0.25, 0.001, epochs=4, hold=1)`.
"""

import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal, TypeVar

from gradwire.core.notation import Expression, with_replaced, written_as_text

Shape = Literal["exponential", "linear", "cosine"]
T = TypeVar("T")


class _Moving(Expression):
    """What the two kinds of ramp share; their fields are declared by each, after the number."""

    start: float
    end: float
    epochs: float
    steps: int
    shape: Shape
    after: float
    hold: float

    def __post_init__(self) -> None:
        for name in ("start", "end", "epochs", "after", "hold"):  # equal ramps are written alike
            if isinstance(getattr(self, name), _Moving):
                raise ValueError(f"ramp: {name} is a ramp itself. Write a number.")
            object.__setattr__(self, name, float(getattr(self, name)))
        if (self.epochs > 0) == (self.steps > 0) or min(self.epochs, self.steps) < 0:
            raise ValueError(
                f"ramp: give the time it takes in epochs or in steps, one of them; got "
                f"epochs={self.epochs}, steps={self.steps}. Write ramp(0.25, 0.001, epochs=4)."
            )
        for name in ("start", "end", "epochs", "after", "hold"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"ramp: {name} must be finite, got {getattr(self, name)}")
        if self.after < 0 or self.hold < 0:
            raise ValueError(
                f"ramp: after and hold are times, not negative; got {self.after}, {self.hold}"
            )
        if self.shape == "exponential" and not (self.start > 0 and self.end > 0):
            raise ValueError(
                f"ramp: from {self.start} to {self.end} by equal factors is impossible, both must "
                'be above 0. Write shape="linear".'
            )

    @property
    def first(self) -> float:
        return self.start

    @property
    def last(self) -> float:
        return self.end

    def __bool__(self) -> bool:
        return bool(self.start or self.end)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Moving) and repr(self) == repr(other)

    def __ne__(self, other: object) -> bool:  # numbers have their own
        return not self == other

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        written = [repr(self.start), repr(self.end)]
        for field in fields(self)[2:]:  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                written.append(f"{field.name}={written_as_text(value)}")
        return f"ramp({', '.join(written)})"

    def value(self, step: int, steps_per_epoch: float | None) -> float:
        """The value in a step."""
        unit = 1.0
        if self.epochs:
            if steps_per_epoch is None:
                raise ValueError(
                    f"{self!r}: nobody said how many steps an epoch has. Write steps= "
                    "in place of epochs=, or give steps_per_epoch."
                )
            unit = steps_per_epoch
        time = max(0.0, step / unit - self.after)
        if self.hold:
            # A step at the edge of an epoch belongs to the new one, whatever division makes of it.
            time = math.floor(time / self.hold + 1e-9) * self.hold
        share = min(1.0, time / (self.epochs or self.steps))
        if share == 1.0:
            return self.end
        if self.shape == "exponential":
            return self.start * (self.end / self.start) ** share
        if self.shape == "cosine":
            share = 0.5 - 0.5 * math.cos(math.pi * share)
        return self.start + (self.end - self.start) * share

    def last_step(self, steps_per_epoch: float | None) -> int:
        """The first step from which on nothing changes."""
        unit = (steps_per_epoch or 1.0) if self.epochs else 1.0
        return math.ceil((self.after + (self.epochs or self.steps) + self.hold) * unit)


@dataclass(frozen=True, repr=False, eq=False)
class Ramp(_Moving, float):
    """A number that goes from `start` to `end` within some epochs or steps, and stays there."""

    start: float
    end: float
    epochs: float = 0.0  # that it takes; either this
    steps: int = 0  # or this
    shape: Shape = "exponential"  # by equal factors
    after: float = 0.0  # epochs or steps before it sets off
    hold: float = 0.0  # epochs or steps between two changes; 0: it changes in every step

    def __new__(cls, start: float, *args: Any, **kwargs: Any) -> "Ramp":
        return float.__new__(cls, start)

    def whole(self) -> "WholeRamp":
        """The same, for whole numbers."""
        return WholeRamp(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, repr=False, eq=False)
class WholeRamp(_Moving, int):
    """A ramp that is rounded to whole numbers."""

    start: float
    end: float
    epochs: float = 0.0
    steps: int = 0
    shape: Shape = "exponential"
    after: float = 0.0
    hold: float = 0.0

    def __new__(cls, start: float, *args: Any, **kwargs: Any) -> "WholeRamp":
        return int.__new__(cls, round(start))

    @property
    def first(self) -> int:
        return round(self.start)

    @property
    def last(self) -> int:
        return round(self.end)

    def value(self, step: int, steps_per_epoch: float | None) -> int:
        return round(super().value(step, steps_per_epoch))


class Moment(float):
    """The value of a ramp in a step, for `at`: the number, and the largest that the ramp takes.

    What must stay as it is while the number changes, such as a route, is chosen by that.
    """

    most: float

    def __new__(cls, value: float, most: float | None = None) -> "Moment":
        moment = super().__new__(cls, value)
        moment.most = float(value if most is None else most)
        return moment


def ramps(value: object) -> list[_Moving]:
    """All ramps in an expression."""
    found: list[_Moving] = []

    def seen(ramp: _Moving) -> _Moving:
        found.append(ramp)
        return ramp

    with_replaced(value, _Moving, seen)
    return found


def at(value: T, step: int, steps_per_epoch: float | None = None) -> T:
    """The expression with the values of a step in place of its ramps."""
    if not _has_ramps(value):
        return value
    return _at(value, step, steps_per_epoch)


def _has_ramps(value: object) -> bool:
    try:
        return _hashed_has_ramps(value)
    except TypeError:  # it has no hash
        return bool(ramps(value))


@lru_cache(maxsize=256, typed=True)
def _hashed_has_ramps(value: object) -> bool:
    return bool(ramps(value))


@lru_cache(maxsize=256)
def _at(value: Any, step: int, steps_per_epoch: float | None) -> Any:
    def now(ramp: _Moving) -> float:
        found = ramp.value(step, steps_per_epoch)
        return found if isinstance(found, int) else Moment(found, max(ramp.start, ramp.end))

    return with_replaced(value, _Moving, now)


def at_start(value: T) -> T:
    """The expression as it is in the first step."""
    return with_replaced(value, _Moving, lambda ramp: ramp.first)


def at_end(value: T) -> T:
    """The expression as it is when all its ramps are over."""
    return with_replaced(value, _Moving, lambda ramp: ramp.last)
