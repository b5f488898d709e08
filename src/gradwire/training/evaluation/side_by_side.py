"""Gradients of several workers side by side, on the cores that one gradient leaves idle.

Each is evaluated by one thread, with a copy of the module of its own and as many of torch's threads
as before. So its bits are those of one after another.
"""

import copy
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import torch

from gradwire.training.gradient import GradientRequest, GradientResult
from gradwire.training.skeleton import Skeleton

CORES_VARIABLE = "GRADWIRE_CORES"
_MOST = 8  # threads: each holds a copy of the module, and Python runs one at a time

Evaluate = Callable[[Skeleton, GradientRequest], GradientResult]


def num_cores() -> int:
    """Those that this process may use: $GRADWIRE_CORES, or as many as it may run on."""
    chosen = os.environ.get(CORES_VARIABLE, "")
    if chosen.isdecimal() and int(chosen):
        return int(chosen)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class SideBySide:
    """Evaluates requests on threads, where there are cores for more than one."""

    def __init__(self, skeleton: Skeleton, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self._skeleton = skeleton
        self._idle: SimpleQueue[Skeleton] = SimpleQueue()  # copies that no thread uses now
        self._num_copies = 0
        self._pool: ThreadPoolExecutor | None = None

    def run(self, requests: list[GradientRequest]) -> list[GradientResult]:
        """The results, in order."""
        width = min(num_cores() // torch.get_num_threads(), _MOST, len(requests))
        if width < 2:
            return [self._evaluate(self._skeleton, request) for request in requests]
        while self._num_copies < width:
            self._idle.put(copy.deepcopy(self._skeleton))
            self._num_copies += 1
        threads = torch.get_num_threads()

        def evaluate(request: GradientRequest) -> GradientResult:
            torch.set_num_threads(threads)  # each thread of Python has a number of its own
            skeleton = self._idle.get()
            try:
                return self._evaluate(skeleton, request)
            finally:
                self._idle.put(skeleton)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(_MOST, thread_name_prefix="gradwire-gradients")
        # As many tasks as threads: each takes every width-th request.
        jobs = [
            self._pool.submit(
                lambda own: [evaluate(request) for request in own], requests[i::width]
            )
            for i in range(width)
        ]
        results: list[GradientResult | None] = [None] * len(requests)
        for i, job in enumerate(jobs):
            results[i::width] = job.result()
        return [result for result in results if result is not None]
