"""Room for large payloads before they are announced, so that they need not wait to be let in.

On gloo a send waits until the receiver has said that it is ready, and what it says queues up behind
what it sends itself. A receive that is posted when the payload's length is known is too late: two
ranks that exchange large payloads would do so one after the other, and a slow link is used
three times instead of once. So a receiver always has a receive posted for a payload as long as the
longest so far. Both ends see the same payloads in the same order, so that the sender knows what the
receiver expects: nothing has to be said about it.

The posted receive of before cannot be taken back when a longer one is posted. It stays, with memory
that nobody has touched; so lengths are rounded up to powers of two, and there are few of them.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

MAX_NBYTES = 1 << 26  # longer ones take so much time that waiting to be let in does not count


class Expected:
    """How long a payload from one rank to another may be. Both ranks keep one, and update it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.tag = 0  # of the posted receive; 0 is that of everything else

    def takes(self, nbytes: int) -> int:
        """The tag under which a payload of this length goes."""
        tag = self.tag if nbytes <= self.nbytes else 0
        if self.nbytes < nbytes <= MAX_NBYTES:
            self.nbytes = 1 << (nbytes - 1).bit_length()
            self.tag += 1
        return tag


class Awaited:
    """The receiver's side: takes the payloads of one peer."""

    def __init__(self, group: dist.ProcessGroup, peer: int, empty: Callable[[int], Tensor]) -> None:
        """`empty` makes room for so many bytes."""
        self._group, self._peer, self._empty = group, peer, empty
        self._expected = Expected()
        self._posted: tuple[dist.Work, Tensor] | None = None

    def payload(self, nbytes: int) -> Tensor:
        """The next one, of this length; waits for it."""
        expected, posted = self._expected, self._posted
        before = expected.tag
        tag = expected.takes(nbytes)
        if tag:
            assert posted is not None
            work, room = posted
        else:
            work, room = self._post(nbytes, 0)
        if tag or expected.tag != before:  # before it waits: the next one may be close behind
            self._posted = self._post(expected.nbytes, expected.tag)
        work.wait()
        return room[:nbytes]

    def _post(self, nbytes: int, tag: int) -> tuple[dist.Work, Tensor]:
        room = self._empty(nbytes)
        return self._group.recv([room], self._peer, tag), room
