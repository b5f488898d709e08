"""Whether a schedule that was decided by a measurement should be decided again.

Networks and machines change while a run goes on. The coordinator compares how long steps take with
how long they took after the last decision. If several segments in a row are off by a quarter, all
ranks measure again (`schedule.py`). The measurement costs time, so it is done at most when the run
has gone on for twenty times as long since the last one.
"""

import time
from collections.abc import Callable
from statistics import median

_OFF = 0.25  # relative difference of step times that counts
_IN_A_ROW = 3  # segments
_LEAST_S = 0.2  # a segment that is shorter says little
_SPACING = 20  # times the duration of a measurement


class Drift:
    """The step times since the last decision."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decided_s = clock()
        self._measured_s = 0.0  # duration of the last measurement
        self._first_s: list[float] = []  # of a step, in the segments after the last decision
        self._num_segments = 0
        self._num_off = 0  # the last ones

    def note(self, step_s: float, num_steps: int) -> bool:
        """A segment has ended; whether it is time to measure again."""
        if num_steps * step_s < _LEAST_S:
            return False
        self._num_segments += 1
        if self._num_segments == 1:  # its first steps allocate memory
            return False
        if len(self._first_s) < _IN_A_ROW:
            self._first_s.append(step_s)
            return False
        is_off = not 1 / (1 + _OFF) <= step_s / median(self._first_s) <= 1 + _OFF
        self._num_off = self._num_off + 1 if is_off else 0
        since_s = self._clock() - self._decided_s
        return self._num_off >= _IN_A_ROW and since_s >= _SPACING * self._measured_s

    def note_decision(self, measured_s: float) -> None:
        """The schedule was decided again; the measurement took so long."""
        self._decided_s, self._measured_s = self._clock(), measured_s
        self._first_s, self._num_segments, self._num_off = [], 0, 0
