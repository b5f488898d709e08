"""Timers of the programs of one process that sleep, or wait for a limited time."""

import time
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from gradwire.core.node import RunningProgram


class Timers:
    """Timers by due time. One whose program no longer waits for that effect does not count."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RunningProgram[Any], Any]] = []
        self._numbers = count()

    @property
    def due_s(self) -> float:
        """When the first one expires, on the monotonic clock."""
        return self._heap[0][0] if self._heap else inf

    def set(self, task: RunningProgram[Any], seconds: float) -> None:
        """Ends what a program waits for now after this time."""
        due_s = time.monotonic() + seconds
        heappush(self._heap, (due_s, next(self._numbers), task, task.waiting_for))

    def expired(self) -> Iterator[tuple[RunningProgram[Any], Any]]:
        """Removes the timers whose time is over: programs, and the effects they wait for."""
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            _, _, task, effect = heappop(self._heap)
            if task.waiting_for is effect:
                yield task, effect

    def clear(self) -> None:
        self._heap.clear()
