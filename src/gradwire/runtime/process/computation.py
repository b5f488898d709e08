"""Gradients that come layer by layer, while messages travel.

A gradient is computed on the engine's thread. Whenever a layer's gradient is there, the programs
that wait for it continue: they encode it and hand it to the transport, whose own threads send and
receive while the next layer is computed. A second Python thread would compete with the first for
the interpreter and for the cores.
"""

import sys
from collections.abc import Callable
from math import inf
from typing import Any

from gradwire.core.node import Computation
from gradwire.runtime.interpreter.interpreter import Task

# Computes a gradient and calls back for each layer whose gradient is there, with its number and the
# result so far. Layers before the one of the last call have not been reached. Where parameters are
# still arriving it calls before it reads those of a layer.
OnLayer = Callable[[int, Any], None]
BeforeLayer = Callable[[int], None]
LayerEvaluator = Callable[[Any, OnLayer, BeforeLayer | None], None]
LAST_LAYER = sys.maxsize  # however many there are


class ProcessComputation(Computation):
    """A gradient under way in this process."""

    __slots__ = ("_num_open", "_waiting", "failure", "reached", "request", "result")

    def __init__(self, request: Any, is_open: bool = True) -> None:
        self.request = request
        self._num_open: float = inf if is_open else 0  # layers whose parameters are there
        self.result: Any = None
        self.failure: Exception | None = None
        self.reached: int | None = None  # the first layer whose gradient is there
        self._waiting: list[tuple[Task, int]] = []

    @property
    def has_all_params(self) -> bool:
        """Whether none is still to arrive."""
        return self._num_open == inf

    def is_open(self, layer: int) -> bool:
        return layer < self._num_open

    def open(self, layer: int, is_last: bool) -> bool:
        """The parameters of a layer are there, as are those before it; whether it is the first."""
        is_first = not self._num_open
        self._num_open = inf if is_last else layer + 1
        return is_first

    def has_reached(self, layer: int) -> bool:
        return self.reached is not None and layer >= self.reached

    def wait(self, task: Task, layer: int) -> None:
        self._waiting.append((task, layer))

    def advance(self, layer: int, result: Any) -> list[Task]:
        """A layer's gradient is there. Returns the programs that waited for it."""
        self.reached, self.result = layer, result
        return self._take(lambda waited: waited >= layer)

    def fail(self, error: Exception) -> list[Task]:
        """Returns all programs that wait."""
        self.failure = error
        return self._take(lambda waited: True)

    def _take(self, is_ready: Callable[[int], bool]) -> list[Task]:
        ready = [task for task, layer in self._waiting if is_ready(layer)]
        self._waiting = [entry for entry in self._waiting if not is_ready(entry[1])]
        return ready
