"""Work that programs ask for: `compute` goes to an evaluator; `call` and `share` are run here.

Calls are timed and priced, and done once where all ranks share them.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradwire.core.exchange import Gathered
from gradwire.core.metering import Work, metered
from gradwire.core.node import Call
from gradwire.runtime.virtual.coding_time import CodingTime

Evaluator = Callable[[list[Any]], Sequence[Any]]  # requests to results

_SHARED_KEPT = 512  # results remembered for ranks that have not asked yet


def no_evaluator(requests: list[Any]) -> Sequence[Any]:
    raise RuntimeError("this engine was made without an evaluator: programs cannot compute")


class Calls:
    """The functions that programs call, and the seconds they took here.

    `coding` says what a call takes in virtual time; None: nothing.
    """

    def __init__(self, num_ranks: int, coding: CodingTime | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by function
        self._num_ranks = num_ranks
        self._coding = coding
        self._clock = time.perf_counter if coding is None else coding.clock
        self._shared: dict[Any, list[Any]] = {}  # key -> [result, cost, ranks to come, arguments]

    def run(self, effect: Call[Any]) -> tuple[Any, float]:
        """The result, and the seconds of virtual time it takes a rank to compute it."""
        if not effect.shared or self._num_ranks == 1:
            return self._priced(effect)
        key = (effect.function, *map(_identity, effect.args))
        entry = self._shared.get(key)
        if entry is None:
            result, cost = self._priced(effect)
            if len(self._shared) >= _SHARED_KEPT:  # forget the oldest: only speed is lost
                del self._shared[next(iter(self._shared))]
            # Keeping the arguments alive keeps their identities from being used again.
            self._shared[key] = [result, cost, self._num_ranks - 1, effect.args]
            return result, cost
        entry[2] -= 1
        if entry[2] == 0:
            del self._shared[key]
        return entry[0], entry[1]

    def forget(self) -> None:
        """Drops shared results at the end of a run: no other rank will ask for them."""
        self._shared.clear()

    def _priced(self, effect: Call[Any]) -> tuple[Any, float]:
        coding, work = self._coding, list[Work]()
        if coding is not None and coding.meters:
            with metered(self._clock if coding.times_codecs else None) as work:
                result, seconds = self._timed(effect)
        else:
            result, seconds = self._timed(effect)
        cost = 0.0 if coding is None else coding.seconds(effect, result, work, seconds)
        return result, cost

    def _timed(self, effect: Call[Any]) -> tuple[Any, float]:
        start = self._clock()
        result = effect.function(*effect.args)
        seconds = self._clock() - start
        function = effect.function
        self.seconds[getattr(function, "__qualname__", type(function).__name__)] += seconds
        return result, seconds


# Of these, and of tuples of nothing else, every value is its own identity.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


def _identity(value: Any) -> Any:
    """Tensors, and what all members of a group have received, are the same if they are the same
    object; everything else if it is equal."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor | Gathered):
        return id(value)
    if isinstance(value, tuple | list):
        if kind is tuple and _PLAIN.issuperset(map(type, value)):  # such as ranks
            return value
        return tuple(map(_identity, value))
    if isinstance(value, dict):
        return tuple((key, _identity(item)) for key, item in value.items())
    return value
