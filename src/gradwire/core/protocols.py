"""The three other dimensions, and what they may ask of one another.

Synchronization says when workers agree, architecture who talks to whom, scheduling when each
part of a gradient travels, compression (codec, reducer) what travels. None of them imports
another: `training/worker.py` is where the four meet.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from gradwire.core.codec import State
from gradwire.core.group import Group
from gradwire.core.node import Node
from gradwire.core.notation import Expression


@dataclass(frozen=True, slots=True)
class Bucket:
    """A named slice of the flat parameter vector: what is exchanged in one piece."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Replica:
    """One worker's model and everything that belongs to it. Tensors in it are never changed."""

    params: Tensor  # [d]
    buffers: Mapping[str, Tensor]  # BatchNorm's running statistics
    optimizer: Mapping[str, Tensor]
    exchange: tuple[State, ...]  # compression state, one per bucket
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # of the synchronization algorithm
    loss: Tensor | None = None  # of the last mini-batch
    num_dropped: int = 0  # steps that were dropped because of NaN or infinity

    def having(self, **changes: Any) -> "Replica":
        return replace(self, **changes)


class Worker(Protocol):
    """What a synchronization algorithm can do; every result is a new value."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def node(self) -> Node: ...

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; the last one is number num_steps - 1."""
        ...

    async def gradient(self, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        """The gradient on this worker's own mini-batch; None if this step is to be dropped."""
        ...

    async def mean_gradient(self, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        """The mean gradient of all workers; None if this step is to be dropped."""
        ...

    async def mean(self, x: Tensor, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        """The mean of a vector like the parameters; None if this step is to be dropped."""
        ...

    async def update(
        self, replica: Replica, gradient: Tensor, step: int, *, shared: bool
    ) -> Replica:
        """One step of the optimizer; `shared`: all workers do this on the same values."""
        ...


class Synchronization(Expression, ABC):
    """When workers agree."""

    # What is averaged: with gradients the optimizer comes after, with walks it came before.
    exchanges: Literal["gradients", "walks"] = "gradients"

    needs: str = "mean"  # the ability of the architecture it is built on

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        """What the algorithm keeps with each replica."""
        return {}

    def agreed(self, replica: Replica) -> Tensor:
        """The parameters that the workers agreed on last: the model to evaluate and keep."""
        return replica.params

    @abstractmethod
    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        """One training step of one worker."""


class Architecture(Expression, ABC):
    """Who talks to whom."""

    offers: frozenset[str] = frozenset({"mean"})

    @abstractmethod
    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        """The collectives of this architecture, for one tensor; among some of the workers."""


class Backward(Protocol):
    """A gradient in the making: what a schedule overlaps communication with."""

    async def whole(self) -> Tensor:
        """Waits for the backward pass to end: the flat gradient."""
        ...


Reduce = Callable[[Bucket, Tensor], Awaitable[None]]


class Scheduling(Expression, ABC):
    """When each part of a gradient travels."""

    @abstractmethod
    def buckets(self, tensors: Sequence[Bucket]) -> list[Bucket]:
        """What is exchanged in one piece, given the model's tensors in order."""

    @abstractmethod
    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        """Calls `reduce` once for every bucket, when its time has come."""


def check_fit(synchronization: Synchronization, architecture: Architecture) -> None:
    """Refuses a pair that makes no sense, with the reason."""
    if synchronization.needs not in architecture.offers:
        raise ValueError(
            f"{synchronization!r} needs an architecture with {synchronization.needs}; "
            f"{architecture!r} offers {', '.join(sorted(architecture.offers))}."
        )
