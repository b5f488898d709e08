"""The start of `dq`'s search for a step, and the state that it keeps from the search before."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.source_coding._dq_quantised import Prior, Way
from gradwire.compression.source_coding._dq_wire import NO_OFFSETS
from gradwire.core.codec import State
from gradwire.kernels.reference.trellis import CLASSES

_MAX_AGE, _MIN_AGE = 128, 3  # calls that a choice lasts at most, and at least
_SHAPE_CHANGE = 0.06  # a choice is renewed if a shape exceeds the known range by this
_ERROR_GROWTH = 1.1  # a choice is renewed if an error exceeds the known ones by this factor
_SHAPE_SAMPLE = 1 << 14  # elements that a shape is computed from


class Hint(NamedTuple):
    """The best step of a search over all steps."""

    error: float
    step: float  # log2, in terms of the root mean square
    way: Way
    follows: bool = False  # the size, as longer vectors do, which was better than any of these
    age: int = 0  # calls since then

    @staticmethod
    def of(state: State) -> "Hint":
        error, step, way, follows, age = state
        return Hint(error, step, Way(way), follows, age)

    def state(self) -> State:
        return self.error, self.step, int(self.way), self.follows, self.age


class Choice(NamedTuple):
    """The range of vectors for which a rule was chosen, and confirmed as the best."""

    low: float  # shapes: see `tail_shape`
    high: float
    error: float  # the largest of those
    last: float  # error
    age: int = 0  # calls since then

    def holds(self, shape: float) -> bool:
        if self.age < _MIN_AGE:
            return True
        is_like = self.low - _SHAPE_CHANGE <= shape <= self.high + _SHAPE_CHANGE
        return is_like and self.last <= _ERROR_GROWTH * self.error and self.age < _MAX_AGE

    def confirmed(self, by: "Choice") -> "Choice":
        """The same rule was chosen again. After `_MAX_AGE` calls the known range is reset."""
        if self.age >= _MAX_AGE:
            return by
        low, high = min(self.low, by.low), max(self.high, by.high)
        return Choice(low, high, max(self.error, by.error), by.last)


class Start(NamedTuple):
    """Where a search for the step begins: at that of the last vector, or of a sample."""

    step: float  # log2, in terms of the root mean square
    slope: float  # by how many times faster the size falls than the step grows, as logarithms
    prior: Prior
    choice: Choice | None = None
    hint: Hint | None = None

    @staticmethod
    def of(state: State) -> "Start":
        hint = None if state["hint"] is None else Hint.of(state["hint"])
        choice = Choice(*state["choice"]) if state.get("choice") else None
        return Start(state["step"], state["slope"], Prior.of(state), choice, hint)

    def state(self) -> State:
        return {
            "step": self.step,
            "slope": self.slope,
            **self.prior.state(),
            "choice": None if self.choice is None else tuple(self.choice),
            "hint": None if self.hint is None else self.hint.state(),
        }


def make_fresh_start() -> Start:
    levels = kernels.trellis_tables(torch.zeros(2 * CLASSES, 4, dtype=torch.int64, device="cpu"))[0]
    return Start(0.0, 1.0, Prior(levels, NO_OFFSETS, Way.PLAIN))


def tail_shape(x: Tensor, rms: float) -> float:
    """How the mean magnitude compares with the root mean square, as log2: less in heavy tails."""
    some = x[:: x.numel() // _SHAPE_SAMPLE | 1]  # odd: not always the same column
    mean = float(kernels.mean_magnitudes(some, some.numel()))
    return math.log2(max(mean / rms, 1e-30))
