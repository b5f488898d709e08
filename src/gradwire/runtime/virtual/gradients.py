"""Gradients that programs wait for, evaluated together and as late as possible."""

from typing import Any

from gradwire.core.node import RunningProgram
from gradwire.runtime.interpreter.calls import Evaluator

_UNKNOWN = object()  # the result of a request that has not been evaluated


class PendingGradient:
    """A gradient that was asked for, and its result once it has been evaluated."""

    __slots__ = ("request", "result", "task")

    def __init__(self, task: RunningProgram[Any], request: Any) -> None:
        self.task = task
        self.request = request
        self.result: Any = _UNKNOWN


def _rank(pending: PendingGradient) -> int:
    return pending.task.rank


class PendingGradients:
    """All gradients that have not been evaluated."""

    __slots__ = ("_evaluate", "_pending")

    def __init__(self, evaluate: Evaluator) -> None:
        self._evaluate = evaluate
        self._pending: list[PendingGradient] = []

    def add(self, task: RunningProgram[Any], request: Any) -> PendingGradient:
        added = PendingGradient(task, request)
        self._pending.append(added)
        return added

    def result(self, gradient: PendingGradient) -> Any:
        if gradient.result is _UNKNOWN:
            # In the order of ranks: in a batch, bits may depend on the position in memory.
            pending, self._pending = sorted(self._pending, key=_rank), []
            results = self._evaluate([one.request for one in pending])
            assert len(results) == len(pending), "an evaluator answers every request"
            for one, result in zip(pending, results):
                one.result = result
        return gradient.result

    def forget(self, rank: int) -> None:
        """Drops the requests of a node that crashed."""
        self._pending = [one for one in self._pending if one.task.rank != rank]

    def clear(self) -> None:
        self._pending.clear()
