"""SIGTERM and SIGINT: a rank ends at a point where all ranks can stop, with a checkpoint.

Until the rank reaches such a point, a signal is only noted. A second signal, or a signal at any
other time, ends the rank at once.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A sender of a signal to a group of processes often signals each process, too. Signals within
# this time count as one.
_SAME_SIGNAL_S = 2.0


class Interrupted(Exception):
    """A run that ended because of a signal."""

    def __init__(self, number: int, advice: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}. {advice}".strip())
        self.number = number


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Blocks SIGINT for a process that is started here, until `Signals.caught` in that process.
    Otherwise a signal while it imports modules would end it with a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """The signals that this process received."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end  # called when the process has to end at once
        self.wanted = 0  # the number of the signal that was received
        self.received_s = 0.0  # when the first one was received, on time.monotonic
        self._may_wait = False

    @contextlib.contextmanager
    def caught(self) -> Iterator["Signals"]:
        """In the main thread: this object handles signals in this block."""
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see `held`
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block the caller polls `wanted`, so a first signal is only noted."""
        self._may_wait = True
        try:
            yield
        finally:
            self._may_wait = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        may_wait = self._may_wait and (not self.wanted or now - self.received_s < _SAME_SIGNAL_S)
        self.received_s = self.received_s if self.wanted else now
        self.wanted = number  # always: an exception raised in a `__del__` is lost
        if not may_wait:
            self._on_end()
            raise Interrupted(number)
