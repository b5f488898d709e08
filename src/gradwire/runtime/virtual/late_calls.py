"""Calls that are evaluated together and as late as possible, as gradients are.

A call takes virtual time, and its result is needed when that is over. So a call of a function with
a batched form (`core/batched.py`) waits until the first of those outstanding is due; then all that
belong together are handed over at once. How long a call takes must be known when it is made: by the
table of costs that is a function of what it reads and makes, so the first call of a kind is done at
once and the others take as long. Results and times are those of one call after another.

What encoding takes depends on the payload, but it takes some time whatever that is. So such calls
are held: they are evaluated together just before the first of them may be over; then it is known
when each is.
"""

from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any

import torch

from gradwire.core.batched import BatchedForm, form_of
from gradwire.core.metering import metered
from gradwire.core.node import Call
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.virtual.coding_time import CodingTime, ModelledCoding

_UNKNOWN = object()  # the result of a call that has not been evaluated
_NO_TIME = -1.0  # the cost of calls whose time depends on more than what they read and make


class LateCall:
    """A call that was made, and its result once it has been evaluated."""

    __slots__ = ("_calls", "_failure", "_result", "args", "key")

    def __init__(self, calls: "LateCalls", key: Hashable, args: tuple[Any, ...]) -> None:
        self._calls = calls
        self.key = key
        self.args = args
        self._result: Any = _UNKNOWN
        self._failure: Exception | None = None

    def result(self) -> Any:
        if self._result is _UNKNOWN and self._failure is None:
            self._calls.evaluate(self.key)
        if self._failure is not None:
            raise self._failure
        return self._result

    def answer(self, result: Any) -> None:
        self._result = result

    def fail(self, failure: Exception) -> None:
        self._failure = failure


class HeldCall:
    """A call whose result and cost are not known yet."""

    __slots__ = (
        "at",
        "cost",
        "effect",
        "failure",
        "is_evaluated",
        "key",
        "least_s",
        "number",
        "result",
        "task",
    )

    def __init__(self, effect: Call[Any], key: Hashable, least_s: float) -> None:
        self.effect = effect
        self.key = key
        self.least_s = least_s  # that it takes at least
        self.at = 0.0  # when it was made
        self.task: Any = None  # the program that waits
        self.number = 0  # of the event in which it goes on
        self.result: Any = None
        self.cost = 0.0
        self.failure: Exception | None = None
        self.is_evaluated = False


class LateCalls(Calls):
    """Calls whose results may come as a `LateCall`, to be asked when they are due, or as a
    `HeldCall`."""

    def __init__(self, num_ranks: int, coding: CodingTime | None = None) -> None:
        super().__init__(num_ranks, coding)
        self._costs: dict[Hashable, float] = {}  # by function and what it reads
        self._pending: dict[Hashable, list[LateCall]] = {}  # by function and group
        self._is_priced = isinstance(coding, ModelledCoding) and num_ranks > 1
        self.may_hold = False  # whether the engine takes calls that are held

    def _priced(self, effect: Call[Any]) -> tuple[Any, float]:
        form = form_of(effect.function) if self._is_priced else None
        if form is not None and form.reports and (effect.shared or not self.may_hold):
            form = None
        keys = None if form is None else form.keys(effect.args)
        if keys is None:
            return super()._priced(effect)
        assert form is not None
        if form.reports:
            assert isinstance(self._coding, ModelledCoding)
            least_s = self._coding.reported_seconds(form.least_work(effect.args))
            return HeldCall(effect, (effect.function, keys[1]), least_s), 0.0
        kind = effect.function, keys[0]
        cost = self._costs.get(kind)
        if cost is None:
            return self._first(effect, kind)
        if cost <= 0.0:
            return super()._priced(effect)
        key = effect.function, keys[1]
        late = LateCall(self, key, effect.args)
        self._pending.setdefault(key, []).append(late)
        return late, cost

    def _first(self, effect: Call[Any], kind: Hashable) -> tuple[Any, float]:
        """The first call of its kind tells what the others cost, unless codecs report."""
        assert self._coding is not None
        with metered() as work:
            result, seconds = self._timed(effect)
        cost = self._coding.seconds(effect, result, work, seconds)
        self._costs[kind] = _NO_TIME if work else cost
        return result, cost

    def price(self, effect: Call[Any]) -> float | None:
        """What a call of a function without codecs takes, wherever one like it is made.

        None: that is not known before.
        """
        if self._coding is None:
            return 0.0
        if not isinstance(self._coding, ModelledCoding):
            return None
        form = form_of(effect.function) if self._is_priced else None
        keys = None if form is None else form.keys(effect.args)
        if keys is None:
            return super()._priced(effect)[1]
        kind = effect.function, keys[0]
        cost = self._costs.get(kind)
        return self._first(effect, kind)[1] if cost is None else cost

    def evaluate(self, key: Any) -> None:
        """Evaluates all outstanding calls of a function and a group."""
        calls, function = self._pending.pop(key), key[0]
        form = form_of(function)
        assert form is not None
        start = perf_counter()
        if len(calls) == 1:
            _answer_alone(function, calls[0])
        else:
            _answer_together(function, form, calls)
        name = getattr(function, "__qualname__", type(function).__name__)
        self.seconds[name] += perf_counter() - start

    def evaluate_held(self, calls: Sequence[HeldCall]) -> None:
        """Finds results and costs of calls that are held, those of a group together."""
        groups: dict[Hashable, list[HeldCall]] = {}
        for call in calls:
            call.is_evaluated = True
            groups.setdefault(call.key, []).append(call)
        for group in groups.values():
            if len(group) == 1 or not self._evaluate_group(group):
                for call in group:
                    self._evaluate_alone(call)

    def _evaluate_group(self, calls: Sequence[HeldCall]) -> bool:
        """False if they cannot be done at once. If one fails, each is done alone to find which."""
        assert self._coding is not None
        function = calls[0].effect.function
        form = form_of(function)
        assert form is not None
        start = perf_counter()
        try:
            found = form.run([call.effect.args for call in calls])
        except torch.OutOfMemoryError:  # one after the other they take less
            return False
        except Exception:
            for call in calls:
                self._evaluate_alone(call)
            if all(call.failure is None for call in calls):
                raise  # no call is to blame
            return True
        if found is None:
            return False
        seconds = perf_counter() - start
        self.seconds[function.__qualname__] += seconds
        for call, (result, work) in zip(calls, found, strict=True):
            call.result = result
            call.cost = self._coding.seconds(call.effect, result, work, seconds / len(calls))
        return True

    def _evaluate_alone(self, call: HeldCall) -> None:
        try:
            call.result, call.cost = super()._priced(call.effect)
        except Exception as error:
            call.failure = error

    def forget(self) -> None:
        super().forget()
        self._pending.clear()


def _answer_together(
    function: Callable[..., Any], form: BatchedForm, calls: Sequence[LateCall]
) -> None:
    """If one of them fails, which one, and with what, is found by doing each alone."""
    try:
        results = form.run([call.args for call in calls])
    except Exception:
        fails = [_answer_alone(function, call) for call in calls]
        if not any(fails):
            raise  # no call is to blame
        return
    assert results is not None, "only forms that report may refuse a group"
    for call, result in zip(calls, results, strict=True):
        call.answer(result)


def _answer_alone(function: Callable[..., Any], call: LateCall) -> bool:
    """Whether it fails."""
    try:
        call.answer(function(*call.args))
    except Exception as error:
        call.fail(error)
        return True
    return False
