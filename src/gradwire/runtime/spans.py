"""Spans: what each node did, and from when to when, for `gradwire timeline`.

A node has lanes: gradients (`compute`), work besides them (`encode`, `decode`, `update`, `other`)
and the two directions of its network card (`send`, `receive`). Engines fill a log if they are given
one (`runtime/virtual/spans.py`, `runtime/process/spans.py`); without one they do nothing for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

COMPUTE, ENCODE, DECODE, UPDATE, OTHER = "compute", "encode", "decode", "update", "other"
SEND, RECEIVE = "send", "receive"
CODING = (ENCODE, DECODE, UPDATE, OTHER)
LANES = (COMPUTE, *CODING, SEND, RECEIVE)

_WORDS = {  # in the name of a function -> its lane
    "encode": ENCODE,
    "decode": DECODE,
    "mean_of": DECODE,
    "MeanOf": DECODE,
    "join_answers": DECODE,
}
_UPDATES = ("clipped_update", "_update", "update")  # of the optimizer


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that a node did. Times are in seconds."""

    rank: int
    lane: str
    name: str  # of a layer, a function, a tensor
    start_s: float
    end_s: float
    # Of a message: `send` and `receive` of the same message have the same number. It could have
    # started at `ready_s`, when it was handed over or its first bit was there.
    message: int = -1
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A worker has finished a step (counted from 0)."""

    rank: int
    step: int
    time_s: float


@dataclass
class SpanLog:
    """The spans of a run."""

    num_workers: int
    num_nodes: int
    spans: list[Span] = field(default_factory=list)
    steps: list[StepEnd] = field(default_factory=list)

    # What an observer of workers does (`training/program.py`).

    def worker_started(self, worker: Any) -> None:
        pass

    def step_finished(self, rank: int, step: int, replica: Any, now: float) -> None:
        self.steps.append(StepEnd(rank, step, now))


def describe_call(function: Callable[..., Any]) -> tuple[str, str]:
    """The lane of a function that a program calls, and its name."""
    while isinstance(function, partial):
        function = function.func
    whole = getattr(function, "__qualname__", type(function).__name__)
    owner, _, name = whole.rpartition(".")
    lane = next((lane for word, lane in _WORDS.items() if word in whole), OTHER)
    if name in _UPDATES:
        lane = UPDATE
    if name == "run" and owner:  # the class says more
        name = owner.rpartition(".")[2]
    return lane, name.lstrip("_")
