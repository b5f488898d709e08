"""SIGTERM and SIGINT: a rank ends where all can stop, and leaves a checkpoint.

While a rank waits for such a point a signal is only noted. A second one, or one at any other time,
ends it at once.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Who sends a signal to a whole group of processes often sends it to each of them as well.
_SAME_S = 2.0


class Interrupted(Exception):
    """A run that ended because of a signal."""

    def __init__(self, number: int, advice: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}. {advice}".strip())
        self.number = number


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A SIGINT to a process that is started here waits until it is caught there: before, while that
    process imports what it needs, Python would end it with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """The signals that this process received."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end  # when the process has to end at once
        self.wanted = 0  # the signal, once there was one
        self.told_s = 0.0  # when that was, on time.monotonic
        self._may_wait = False

    @contextlib.contextmanager
    def caught(self) -> Iterator["Signals"]:
        """In the main thread: signals go to this object for a while."""
        before = {number: signal.signal(number, self._tell) for number in _SIGNALS}
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see `held`
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Somebody looks at `wanted` from time to time."""
        self._may_wait = True
        try:
            yield
        finally:
            self._may_wait = False

    def _tell(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        may_wait = self._may_wait and (not self.wanted or now - self.told_s < _SAME_S)
        self.told_s = self.told_s if self.wanted else now
        self.wanted = number  # in any case: what is raised in a `__del__` is lost
        if not may_wait:
            self._on_end()
            raise Interrupted(number)
