"""Requests of workers and answers of servers: their headers, and compressed answers."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.core.codec import Codec, unpack
from gradwire.core.errors import GradwireWarning
from gradwire.core.key import Key
from gradwire.core.node import Tag
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.core.wire import ANSWER, REQUEST

JOINING = -1  # the step of a pull by a worker that joins or comes back


def tags_of(label: str) -> tuple[Tag, Tag]:
    """The tags of requests and answers about a model; "": there is only one."""
    return ((REQUEST, label), (ANSWER, label)) if label else (REQUEST, ANSWER)


@dataclass(frozen=True, slots=True)
class PushHeader:
    unit: int  # the number of the piece
    part: int  # of so many messages for this piece
    num_parts: int
    step: int
    wants_answer: bool
    life: float = 0.0  # incarnation of the worker; 0 if it was there from the start

    @property
    def priority(self) -> int:
        """Where large messages wait, pieces of the front layers go first."""
        return self.unit


@dataclass(frozen=True, slots=True)
class PullHeader:
    step: int
    life: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    clock: int  # the step that the server has reached
    accepted: bool  # whether the push counted
    number: int  # counts the answers to this worker
    is_whole: bool  # whether the shard comes as it is, not as a compressed change
    life: float = 0.0  # incarnation of the worker that asked: a later one ignores the answer


def answer_key(key: Key, number: int, rank: int, server: int) -> Key:
    """The key of the random draws in one answer."""
    return key.at(number).private(rank).child(f"answer of {server}")


def answer_codec(reducer: Reducer, step: int) -> Codec:
    """How servers encode changes of the model: the codec inside the workers' compression."""
    codec = reducer.codec_within(step)
    if codec is not None and codec.traits.statistic is None:
        return codec
    raise ValueError(
        f"{reducer!r} has no codec with which one server alone could compress its answers. "
        'Leave them as they are: parameter_server(answers="dense").'
    )


def check_answers(reducer: Reducer, shards: Sequence[Spec]) -> None:
    """Refuses compression without such a codec, and warns if its error may grow."""
    codec = answer_codec(reducer, 0)
    if not all(codec.guarantee(shard).contracts for shard in shards):
        warnings.warn(
            f"servers follow what workers know through {codec!r}, whose errors may grow. If it "
            'diverges, leave the answers as they are: parameter_server(answers="dense").',
            GradwireWarning,
            stacklevel=4,
        )


def apply_change(codec: Codec, known: Tensor, buffer: Tensor, spec: Spec, key: Key) -> Tensor:
    """The shard after an answer with a change, given the shard before."""
    return known + codec.decode(unpack(codec, buffer, spec), spec, key)
