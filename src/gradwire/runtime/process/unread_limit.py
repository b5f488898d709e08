"""How much may be received from each peer before it is taken.

The thread that receives from a peer pauses above the limit, and with it the peer. While this rank
waits in a send no thread pauses, to avoid deadlock.
"""

import threading


class UnreadLimit:
    """`max_nbytes` of each of `size` peers."""

    def __init__(self, size: int, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._nbytes = [0] * size  # received and not taken, by peer
        # Taken as a lock, not as a condition: then a signal's handler cannot raise in between.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._is_sending = False
        self._is_closed = False

    def add(self, peer: int, nbytes: int) -> None:
        with self._lock:
            self._nbytes[peer] += nbytes

    def take(self, peer: int, nbytes: int) -> None:
        with self._lock:
            was_full = self._nbytes[peer] > self._max_nbytes
            self._nbytes[peer] -= nbytes
            if was_full and self._nbytes[peer] <= self._max_nbytes:
                self._room.notify_all()

    def wait_for_room(self, peer: int) -> None:
        """Called by the thread of this peer."""
        with self._lock:
            while (
                self._nbytes[peer] > self._max_nbytes
                and not self._is_sending
                and not self._is_closed
            ):
                self._room.wait()

    def set_sending(self, is_sending: bool) -> None:
        """Whether this rank waits in a send."""
        if not is_sending:
            self._is_sending = False
            return
        with self._lock:
            self._is_sending = True
            self._room.notify_all()

    def close(self) -> None:
        """Nobody takes anything any more, and nobody waits."""
        with self._lock:
            self._is_closed = True
            self._room.notify_all()
