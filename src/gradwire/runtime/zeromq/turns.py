"""Two threads take turns with the sockets: the caller's while it is in the transport, else another.

Sockets may move between threads that exclude each other. The caller's thread serves them itself
while it waits, so that a message needs no switch of threads. When it has been away for 2 ms, a
stand-in thread serves them until the caller is back and wakes it. So heartbeats, grants and
acknowledgements do not wait for a gradient.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from types import TracebackType

_AWAY_S = 0.002
_PAUSE_S = 0.004  # between two looks while the caller is there


class Turns:
    """`with turns:` is the caller's turn. `serve(timeout_s)` waits for the sockets once."""

    def __init__(self, serve: Callable[[float], None], name: str) -> None:
        self._serve = serve
        # A signal's handler may raise where the caller has just got its turn or is about to end it.
        # That turn never ends, and the caller takes another one to say goodbye.
        self._lock = threading.RLock()
        self._left_s = monotonic()
        self._is_wanted = False
        self._is_over = False
        self.woken, self._waking = socket.socketpair()  # the first is polled with the sockets
        self.woken.setblocking(False)
        self._waking.setblocking(False)
        self._thread = threading.Thread(target=self._stand_in, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Not from within a turn."""
        self._is_over = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        self.woken.close()
        self._waking.close()

    def drain(self) -> None:
        with suppress(BlockingIOError):
            self.woken.recv(4096)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._is_wanted = True
            self.wake()
            self._lock.acquire()
            self._is_wanted = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left_s = monotonic()
        self._lock.release()

    def wake(self) -> None:
        """Ends a wait for the sockets. Any thread may call it."""
        with suppress(OSError):  # there are unread wake-ups enough, or it is closed
            self._waking.send(b"!")

    def _stand_in(self) -> None:
        pause_s = _AWAY_S
        while not self._is_over:
            sleep(pause_s)
            pause_s = _AWAY_S
            if monotonic() - self._left_s < _AWAY_S:
                continue
            if not self._lock.acquire(blocking=False):
                pause_s = _PAUSE_S
                continue
            try:
                while not (self._is_wanted or self._is_over):
                    self._serve(0.25)
            finally:
                self._lock.release()
