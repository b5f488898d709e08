"""Receives for large payloads that are posted before the payloads are announced.

On gloo a send waits for the receiver's signal that it is ready, and this signal queues up behind
the messages that the receiver sends itself. A receive that is posted when the payload's length is
known is too late: two ranks that exchange large payloads would do so one after the other, and a
slow link would be used three times instead of once. So a receiver always has a receive posted for a
payload as long as the longest so far. Both ends see the same payloads in the same order, so the
sender knows without a message what the receiver expects.

An earlier posted receive cannot be cancelled when a longer one is posted. It stays, with memory
that is never touched; so lengths are rounded up to powers of two, and there are few of them.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

MAX_NBYTES = 1 << 26  # for longer ones the wait for the receiver is negligible


class ExpectedLength:
    """The length of the posted receive between two ranks. Both ranks keep one, and update it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.tag = 0  # of the posted receive; all other messages have tag 0

    def next_tag(self, nbytes: int) -> int:
        """The tag of the next payload, which has this length."""
        tag = self.tag if nbytes <= self.nbytes else 0
        if self.nbytes < nbytes <= MAX_NBYTES:
            self.nbytes = 1 << (nbytes - 1).bit_length()
            self.tag += 1
        return tag


class PayloadReceiver:
    """The receiver's side: receives the payloads of one peer."""

    def __init__(self, group: dist.ProcessGroup, peer: int, empty: Callable[[int], Tensor]) -> None:
        """`empty` allocates so many bytes."""
        self._group, self._peer, self._empty = group, peer, empty
        self._expected = ExpectedLength()
        self._posted: tuple[dist.Work, Tensor] | None = None

    def receive(self, nbytes: int) -> Tensor:
        """Waits for the next payload, which has this length."""
        expected, posted = self._expected, self._posted
        before = expected.tag
        tag = expected.next_tag(nbytes)
        if tag:
            assert posted is not None
            work, buffer = posted
        else:
            work, buffer = self._post(nbytes, 0)
        if tag or expected.tag != before:  # before the wait: the next payload may follow soon
            self._posted = self._post(expected.nbytes, expected.tag)
        work.wait()
        return buffer[:nbytes]

    def _post(self, nbytes: int, tag: int) -> tuple[dist.Work, Tensor]:
        buffer = self._empty(nbytes)
        return self._group.recv([buffer], self._peer, tag), buffer
