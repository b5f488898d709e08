"""The clock of the benchmarks that lie next to it."""

import time
from collections.abc import Callable


def best_s(operation: Callable[[], object], repeats: int) -> float:
    """The shortest of several times, in seconds: on a shared machine the least disturbed."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return min(times)
