"""Processor cores that the threads of all nodes share (processor sharing, Kleinrock 1967).

A thread does one job after the other. While k threads have a job and there are c cores, each of
them advances at the rate min(1, c / k), as an operating system divides cores among threads.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count

from gradwire.runtime.virtual.events import WORK, Events

Job = tuple[float, Callable[[], None]]  # seconds of a core, and what happens then


class Thread:
    """Jobs in order; those that can wait are taken when there is no other."""

    __slots__ = ("is_busy", "jobs", "started", "waiting")

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.waiting: deque[Job] = deque()
        self.is_busy = False
        self.started: list[Job] | None = None  # by what happens at the end of a job, meanwhile


class SharedCores:
    """All jobs under way. Each has the same rate, so one clock of the work done serves them all."""

    def __init__(self, num_cores: float, events: Events) -> None:
        self._num_cores = num_cores
        self._events = events
        self._running: list[tuple[float, int, Thread, Callable[[], None]]] = []  # by their ends
        self._numbers = count()
        self._done_s = 0.0  # work that a job would have got done if it had always been running
        self._at = 0.0  # when that was
        self._version = 0  # of the event at which the next job ends
        self.total_s = 0.0  # of all jobs so far

    def submit(self, thread: Thread, seconds: float, then: Callable[[], None]) -> None:
        """Adds a job. What a thread begins at the end of a job comes before what waits."""
        if thread.started is not None:
            thread.started.append((seconds, then))
            return
        thread.jobs.append((seconds, then))
        self._start(thread)

    def submit_last(self, thread: Thread, seconds: float, then: Callable[[], None]) -> None:
        """Adds a job for when the thread has nothing else to do, also not at this time."""
        thread.waiting.append((seconds, then))
        self._look(thread)

    def clear(self) -> None:
        """The run is over."""
        self._running.clear()
        self._version += 1

    @property
    def _rate(self) -> float:
        return min(1.0, self._num_cores / max(1, len(self._running)))

    def _advance(self) -> None:
        now = self._events.now
        self._done_s += (now - self._at) * self._rate
        self._at = now

    def _start(self, thread: Thread) -> None:
        if thread.is_busy:
            return
        if thread.jobs:
            self._run(thread, *thread.jobs.popleft())
        elif thread.waiting:
            self._look(thread)

    def _look(self, thread: Thread) -> None:
        """Lets a thread take a job that can wait, when all events of this time have happened."""

        def take() -> None:
            if not thread.is_busy and not thread.jobs and thread.waiting:
                self._run(thread, *thread.waiting.popleft())

        if not thread.is_busy:
            self._events.push_after(self._events.now, WORK, take)

    def _run(self, thread: Thread, seconds: float, then: Callable[[], None]) -> None:
        self._advance()
        self.total_s += seconds
        thread.is_busy = True
        heappush(self._running, (self._done_s + seconds, next(self._numbers), thread, then))
        self._schedule()

    def _schedule(self) -> None:
        """Finds out again when the next job ends."""
        self._version += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._done_s)
            at = self._events.now + left / self._rate
            self._events.push(at, WORK, partial(self._finish, self._version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # jobs have come since
        self._advance()
        # Rounding must not leave a rest of the job whose end this is.
        self._done_s = max(self._done_s, self._running[0][0])
        ended = []
        while self._running and self._running[0][0] <= self._done_s:
            ended.append(heappop(self._running)[2:])
        self._schedule()
        for thread, then in ended:
            thread.started = []
            then()
            thread.jobs.extendleft(reversed(thread.started))
            thread.started = None
            thread.is_busy = False
            self._start(thread)
