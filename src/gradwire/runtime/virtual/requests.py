"""Gradients asked for: evaluated as late as possible, and then all that are outstanding at once."""

from collections.abc import Callable, Sequence
from typing import Any

from gradwire.core.node import Task

Evaluator = Callable[[list[Any]], Sequence[Any]]
PENDING = object()  # the result of a request that has not been evaluated


def no_evaluator(requests: list[Any]) -> Sequence[Any]:
    raise RuntimeError("this engine was made without an evaluator: programs cannot compute")


class Request:
    """A gradient asked for and perhaps not evaluated yet."""

    __slots__ = ("request", "result", "task")

    def __init__(self, task: Task[Any], request: Any) -> None:
        self.task = task
        self.request = request
        self.result: Any = PENDING


class Requests:
    """Those outstanding."""

    __slots__ = ("_evaluate", "_outstanding")

    def __init__(self, evaluate: Evaluator) -> None:
        self._evaluate = evaluate
        self._outstanding: list[Request] = []

    def add(self, task: Task[Any], request: Any) -> Request:
        added = Request(task, request)
        self._outstanding.append(added)
        return added

    def result(self, request: Request) -> Any:
        if request.result is PENDING:
            outstanding, self._outstanding = self._outstanding, []
            results = self._evaluate([one.request for one in outstanding])
            assert len(results) == len(outstanding), "an evaluator answers every request"
            for one, result in zip(outstanding, results):
                one.result = result
        return request.result

    def forget(self, rank: int) -> None:
        """A node crashed: nobody waits for its gradients."""
        self._outstanding = [one for one in self._outstanding if one.task.rank != rank]

    def clear(self) -> None:
        self._outstanding.clear()
