"""Work that programs ask for: `compute` goes to an evaluator; `call` and `share` are run here.

Calls are timed and priced, and done once where all ranks share them.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradwire.core.exchange import Gathered
from gradwire.core.key import Key
from gradwire.core.metering import Work, metered
from gradwire.core.node import Call
from gradwire.core.spec import Spec
from gradwire.runtime.virtual.coding_time import CodingTime

Evaluator = Callable[[list[Any]], Sequence[Any]]  # requests to results

_SHARED_KEPT = 512  # results remembered for ranks that have not asked yet


def no_evaluator(requests: list[Any]) -> Sequence[Any]:
    raise RuntimeError("this engine was made without an evaluator: programs cannot compute")


class _Shared:
    """A call that all ranks share, and how many of them have not made it yet."""

    __slots__ = ("args", "cost", "key", "num_to_come", "result")

    def __init__(
        self, key: Any, args: tuple[Any, ...], result: Any, cost: float, num_to_come: int
    ) -> None:
        self.key = key  # the function, and the identities of arguments
        self.args = args  # alive, so that their identities are not used again
        self.result = result
        self.cost = cost
        self.num_to_come = num_to_come


class Calls:
    """The functions that programs call, and the seconds they took here.

    `coding` says what a call takes in virtual time; None: nothing.
    """

    def __init__(self, num_ranks: int, coding: CodingTime | None = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)  # by function
        self._num_ranks = num_ranks
        self._coding = coding
        self._clock = time.perf_counter if coding is None else coding.clock
        self._shared: dict[Any, _Shared] = {}
        self._latest: dict[Any, _Shared] = {}  # the last of each function, if others will ask

    def run(self, effect: Call[Any]) -> tuple[Any, float]:
        """The result, and the seconds of virtual time it takes a rank to compute it."""
        if not effect.shared or self._num_ranks == 1:
            return self._priced(effect)
        function, args = effect.function, effect.args
        entry = self._latest.get(function)
        if entry is None or not _are_same(entry.args, args):
            key = (function, *map(_identity, args))
            entry = self._shared.get(key)
            if entry is None:
                return self._share(effect, key)
        entry.num_to_come -= 1
        if entry.num_to_come == 0:
            self._drop(entry)
        return entry.result, entry.cost

    def _share(self, effect: Call[Any], key: Any) -> tuple[Any, float]:
        """Makes a call, and keeps what it gives for the other ranks."""
        result, cost = self._priced(effect)
        if len(self._shared) >= _SHARED_KEPT:  # forget the oldest: only speed is lost
            self._drop(next(iter(self._shared.values())))
        entry = _Shared(key, effect.args, result, cost, self._num_ranks - 1)
        self._shared[key] = self._latest[effect.function] = entry
        return result, cost

    def _drop(self, entry: "_Shared") -> None:
        del self._shared[entry.key]
        if self._latest.get(entry.key[0]) is entry:
            del self._latest[entry.key[0]]

    def forget(self) -> None:
        """Drops shared results at the end of a run: no other rank will ask for them."""
        self._shared.clear()
        self._latest.clear()

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


_BY_VALUE = _PLAIN | {Key, Spec}


def _are_same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether arguments are the same, as far as that is seen without their identities."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others):
        kind = type(one)
        if one is other:
            if kind is dict or kind is list:  # which may hold something else by now
                return False
        elif kind is not type(other) or kind not in _BY_VALUE or one != other:
            return False
    return True


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
