"""The headers of what neighbours send one another. Their bytes count."""

from dataclasses import dataclass
from typing import Literal

# Of the messages of rounds, from one neighbour to another, in the order of the rounds. A round is
# named in the header and not by the tag, so that what is out of date can be read and dropped.
ROUNDS = ("gossip", "rounds")
JOIN = ("gossip", "join")
JOIN_ANSWER = ("gossip", "join answer")
REQUEST = ("gossip", "request")
ANSWER = ("gossip", "answer")

LABEL = "model"  # in the ledger
HEADER_NBYTES = 8  # a kind and the number of a round
NUMBER_NBYTES = 8  # a float64 or a time that goes with it

INITIAL = -1.0  # the life of a worker that is there from the start; a later one: when it began


@dataclass(frozen=True, slots=True)
class RoundHeader:
    """A message of a round, or what is needed to understand those that follow."""

    kind: Literal["data", "introduction", "missed"]
    step: int
    weight: float | None = None  # of push-sum
    version: tuple[float, int] | None = None  # of what this is a change of: the life, a count


@dataclass(frozen=True, slots=True)
class NewIncarnation:
    """What follows comes from a worker that has begun a new life."""

    life: float


@dataclass(frozen=True, slots=True)
class JoinNotice:
    """A worker is (back) there."""

    life: float
    sent_s: float
    wants_answer: bool
    wants_model: bool
    again: bool = False  # the neighbour that was asked first had no model


@dataclass(frozen=True, slots=True)
class UnknownVersion:
    """A neighbour does not know what this one's changes are changes of."""


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """The answer: the first round with the newcomer; None: I am a newcomer myself."""

    life: float  # that of the newcomer
    step: int | None


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One worker asks another to average."""

    step: int
    life: float  # of the one that is asked, as far as is known


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """With a model, or with nothing: then nobody moves."""

    step: int
    life: float  # of the one that answers
