"""Headers of messages between neighbours. Their bytes are counted."""

from dataclasses import dataclass
from typing import Literal

# Tag of the messages of rounds between two neighbours, in the order of the rounds. The header, not
# the tag, names the round, so that outdated messages can be read and dropped.
ROUNDS = ("gossip", "rounds")
JOIN = ("gossip", "join")
JOIN_ANSWER = ("gossip", "join answer")
REQUEST = ("gossip", "request")
ANSWER = ("gossip", "answer")

LABEL = "model"  # in the ledger
HEADER_NBYTES = 8  # a kind and the number of a round
NUMBER_NBYTES = 8  # a float64 or a time that goes with it

INITIAL = -1.0  # incarnation of a worker that is there from the start; later ones are join times


@dataclass(frozen=True, slots=True)
class RoundHeader:
    """Header of a message of a round: data, an introduction, or that the round is missed."""

    kind: Literal["data", "introduction", "missed"]
    step: int
    weight: float | None = None  # of push-sum
    version: tuple[float, int] | None = None  # that this changes: incarnation, number of changes


@dataclass(frozen=True, slots=True)
class NewIncarnation:
    """The messages that follow come from a new incarnation of the sender."""

    life: float


@dataclass(frozen=True, slots=True)
class JoinNotice:
    """A worker joined."""

    life: float
    sent_s: float
    wants_answer: bool
    wants_model: bool
    again: bool = False  # the neighbour that was asked first had no model


@dataclass(frozen=True, slots=True)
class UnknownVersion:
    """The sender does not hold the version that the receiver's changes refer to."""


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """The answer to a notice: the first common round; None: the sender is joining, too."""

    life: float  # incarnation of the joined worker
    step: int | None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One worker asks another to average."""

    step: int
    life: float  # incarnation of the receiver, as far as known


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The answer to a request, with a model; without one, neither worker averages."""

    step: int
    life: float  # incarnation of the sender
