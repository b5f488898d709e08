"""What the engine for real processes asks of a transport, and what a transport tells it."""

from typing import Any, NamedTuple, Protocol

ARRIVED, DONE, GOODBYE, LOST, JOINED = "arrived", "done", "goodbye", "lost", "joined"


class Arrival(NamedTuple):
    """Something happened: a message came, or a peer is done with a run, leaves, is lost or comes."""

    kind: str
    src: int
    job: int = 0
    # The hash of the tag; with DONE the number of the run; with GOODBYE 1 + the rank because of
    # whose loss the peer leaves, or 0.
    tag: int = 0
    message: Any = None  # with LOST the reason, a text
    # With LOST and JOINED: when, on the clock of who keeps the membership; None: it keeps none.
    # A worker that comes has this as its `life`, by which servers know it from who it was before.
    time_s: float | None = None
    number: int = 0  # of this message among those of `src`, from 1; 0: they are not numbered


class Transport(Protocol):
    """Messages between this rank and others: between two ranks they stay in order."""

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
