"""What the engine for real processes asks of a transport, and what a transport tells it."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor

ARRIVED, DONE, GOODBYE, LOST, JOINED = "arrived", "done", "goodbye", "lost", "joined"
FINISHED = "finished"  # a native collective of this rank: `tag` is its number


class Arrival(NamedTuple):
    """What happened: a message came, or a peer is done with a run, leaves, is lost or comes."""

    kind: str
    src: int
    job: int = 0
    # The hash of the tag; with DONE the number of the run; with GOODBYE 1 + the rank because of
    # whose loss the peer leaves (its own: it cannot go on), or 0.
    tag: int = 0
    # With LOST the reason, a text; with FINISHED the mean, or what went wrong, an exception.
    message: Any = None
    # With LOST, JOINED and, where the membership is kept, GOODBYE: when, on the clock of who keeps
    # the membership; None: nobody does.
    # A worker that comes has this as its `life`, by which servers know it from who it was before.
    time_s: float | None = None
    number: int = 0  # of this message among those of `src`, from 1; 0: they are not numbered


def tensor_of(message: Any) -> Tensor | None:
    """The tensor in a message, if it has one."""
    data = message if isinstance(message, Tensor) else getattr(message, "data", None)
    return data if isinstance(data, Tensor) else None


def message_nbytes(message: Any) -> int:
    """Of the tensor in a message."""
    data = tensor_of(message)
    return 0 if data is None else data.numel() * data.element_size()


class Transport(Protocol):
    """Messages between this rank and others: between two ranks they stay in order.

    One that has an all-reduce of its own has `native_mean(x)` besides: it starts one among all its
    ranks, and returns a number, with which `next` will tell that it is FINISHED; None if it cannot
    add such tensors. All ranks start the same ones in the same order. One with `notices_silence`
    says that a rank is lost when nothing is heard of it, though nothing else tells so.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, dst: int, job: int, tag: int, message: Any) -> None:
        """Hands a message over. It waits if too much is under way; nobody changes the message."""
        ...

    def send_done(self, dst: int, job: int, number: int) -> None:
        """Tells a peer that this rank is done with run number `number`."""
        ...

    def next(self, timeout_s: float | None) -> Arrival | None:
        """What happened next; None after so many seconds."""
        ...

    def keep(self, arrival: Arrival) -> None:
        """Gives back what is for a job to come."""
        ...

    def kept(self, job: int) -> list[Arrival]:
        """Takes what was kept for this job. Peers that left or were lost before are told again."""
        ...
