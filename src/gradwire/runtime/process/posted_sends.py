"""Sends of torch.distributed that have been posted and may not have left yet, by peer.

A tensor must live until it has left, so posted sends are kept, up to a number and to a number of
bytes per peer. Beyond that the sender waits for the oldest (back-pressure).
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

import torch.distributed as dist
from torch import Tensor

_MAX_POSTED = 256  # sends to one peer that are kept, however small


class PostedSends:
    """`on_wait(True)` is called before it waits, `on_wait(False)` afterwards.

    A peer that reads nothing for `timeout` is broken: nothing is sent to it any more. Its receiving
    thread reports that it is lost, after everything that came before.
    """

    def __init__(
        self, size: int, max_bytes: int, timeout: timedelta, on_wait: Callable[[bool], None]
    ) -> None:
        self.num_bytes = 0  # of all sends so far
        self._max_bytes, self._timeout, self._on_wait = max_bytes, timeout, on_wait
        self._posted: list[deque[tuple[dist.Work, Tensor]]] = [deque() for _ in range(size)]
        self._bytes_posted = [0] * size
        self._broken: set[int] = set()

    def post(self, peer: int, part: Tensor, start: Callable[[], dist.Work]) -> None:
        """Starts a send as soon as there is room."""
        if peer in self._broken:
            return
        nbytes = part.numel()
        self._wait_below(peer, self._max_bytes - nbytes, _MAX_POSTED - 1)
        try:
            work = start()
        except RuntimeError:
            self._broken.add(peer)
            return
        self._posted[peer].append((work, part))
        self._bytes_posted[peer] += nbytes
        self.num_bytes += nbytes

    def wait_all(self, until_s: float) -> None:
        """Waits until everything has left, but not much longer than `until_s`."""
        waiters = [
            threading.Thread(target=self._wait_below, args=(peer, 0, 0), daemon=True)
            for peer, posted in enumerate(self._posted)
            if posted
        ]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(max(0.1, until_s - monotonic()))

    def _wait_below(self, peer: int, max_bytes: int, max_number: int) -> None:
        """Waits until no more than this is posted, or nothing."""
        posted = self._posted[peer]
        if not posted or (self._bytes_posted[peer] <= max_bytes and len(posted) <= max_number):
            return
        self._on_wait(True)
        while posted and (self._bytes_posted[peer] > max_bytes or len(posted) > max_number):
            work, part = posted.popleft()
            self._bytes_posted[peer] -= part.numel()
            try:
                work.wait(self._timeout)
            except RuntimeError:
                self._broken.add(peer)
                posted.clear()
                self._bytes_posted[peer] = 0
        self._on_wait(False)
