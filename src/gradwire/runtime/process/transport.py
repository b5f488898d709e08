"""The interface between the engine for real processes and a transport."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

ARRIVED, DONE, GOODBYE, LOST, JOINED = "arrived", "done", "goodbye", "lost", "joined"
FINISHED = "finished"  # a native collective of this rank: `tag` is its number
WOKEN = "woken"  # by another thread of this rank
# By peer: its incarnation, and the numbers of the last messages received from it and sent to it.
LinkCounts = dict[int, tuple[float, int, int]]


class Arrival(NamedTuple):
    """An event: a message arrived, or a peer is done with a run, left, was lost or joined."""

    kind: str
    src: int
    job: int = 0
    # The hash of the tag. With DONE the number of the run. With GOODBYE 1 + the rank because of
    # whose loss the peer leaves (its own rank: it cannot continue), or 0.
    tag: int = 0
    # With LOST the reason, a text. With FINISHED the mean, or an exception.
    message: Any = None
    # With LOST, JOINED and GOODBYE: when, on the clock of the scheduler; None: there is none.
    # With JOINED this is the peer's incarnation. With ARRIVED and FINISHED: when it was complete,
    # on the machine's monotonic clock; None: the transport does not say.
    time_s: float | None = None
    number: int = 0  # of this message among those of `src`, from 1; 0: they are not numbered


def tensor_of(message: Any) -> Tensor | None:
    """The tensor in a message, if it has one."""
    data = message if isinstance(message, Tensor) else getattr(message, "data", None)
    return data if isinstance(data, Tensor) else None


def message_nbytes(message: Any) -> int:
    """The size of the tensor in a message."""
    data = tensor_of(message)
    return 0 if data is None else data.numel() * data.element_size()


class Transport(Protocol):
    """Messages between this rank and others: between two ranks they stay in order.

    A transport with an all-reduce of its own also has `native_mean(x)`: it starts one among all its
    ranks and returns a number, with which `next` later returns FINISHED; None if it cannot add such
    tensors. All ranks start the same ones in the same order. One with `wake()` returns WOKEN from
    `next` when another thread has called it. With `notices_silence` a rank is LOST
    when nothing was received from it for some time.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        """Hands over a message, which must not change. It waits if too much is under way."""
        ...

    def send_done(self, dst: int, job: int, number: int) -> None:
        """Reports to a peer that this rank is done with run number `number`."""
        ...

    def next(self, timeout_s: float | None) -> Arrival | None:
        """The next arrival; None after so many seconds."""
        ...

    def defer(self, arrival: Arrival) -> None:
        """Gives back an arrival that is for a later job."""
        ...

    def deferred(self, job: int) -> list[Arrival]:
        """What was kept for this job, and all peers that left or were lost before."""
        ...
