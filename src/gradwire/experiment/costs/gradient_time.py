"""Measures the time of a gradient on this machine, and chooses the number of CPU threads."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from gradwire.core.errors import GradwireWarning
from gradwire.experiment.run.threads import use_threads

# Up to so many parameters one thread is as fast as several on an idle machine, and many times
# faster on a busy one. A rule, not a timing: bits may depend on the number of threads.
SMALL_NUMEL = 200_000
_MIN_REPEATS, _MAX_REPEATS, _ENOUGH_S = 7, 60, 1.0
_LARGE_SPREAD = 1.5


def default_threads(num_parameters: int) -> int:
    """CPU threads of a run that names none; 0: as many as torch takes."""
    return 1 if num_parameters <= SMALL_NUMEL else 0


@dataclass(frozen=True)
class GradientTime:
    """The measured time of a gradient."""

    seconds: float  # the fastest, which other work disturbed least
    median_s: float
    repeats: int
    threads: int

    @property
    def spread(self) -> float:
        """How many times as long as the fastest the middle one took."""
        return self.median_s / self.seconds if self.seconds > 0 else 1.0


def measure_gradient(
    evaluate: Callable[[], None],
    device: torch.device,
    threads: int,
    clock: Callable[[], float] | None = None,
) -> GradientTime:
    """Evaluates a gradient some times and takes the fastest.

    On one thread the time is that which the thread itself was running, so that other processes on
    the machine do not count.
    """
    alone = device.type == "cpu" and threads == 1
    clock = clock or (time.thread_time if alone else time.perf_counter)
    seconds: list[float] = []
    began = time.perf_counter()
    with use_threads(threads):
        evaluate()  # with so many threads for the first time
        while len(seconds) < _MAX_REPEATS:
            start = clock()
            evaluate()
            seconds.append(clock() - start)
            if len(seconds) >= _MIN_REPEATS and time.perf_counter() - began > _ENOUGH_S:
                break
    fastest = float(f"{min(seconds):.4g}")  # more digits would be noise
    found = GradientTime(fastest, median(seconds), len(seconds), threads)
    if found.spread > _LARGE_SPREAD:
        warnings.warn(
            f"the time of a gradient varies: the fastest of {found.repeats} took "
            f"{found.seconds:.3g} s, the middle one {found.median_s:.3g} s. Other work disturbs "
            f"the measurement; give the time, --compute 'fixed({found.seconds:.3g})', or measure "
            "again on a quiet machine.",
            GradwireWarning,
            stacklevel=2,
        )
    return found
