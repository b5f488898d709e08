"""The three other dimensions, and what they may ask of one another.

Synchronization says when workers agree, architecture who talks to whom, scheduling when each
part of a gradient travels, compression (codec, reducer) what travels. None of them imports
another: `training/worker.py` is where the four meet.

What an architecture can do has a name, its ability:
- "mean": an exact mean over all workers, which all of them form together;
- "push_pull": servers hold the model; a worker pushes to them and pulls from them on its own;
- "mix": averages with the neighbours, in rounds;
- "mix_async": averages with one neighbour at a time, whenever a worker likes.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor

from gradwire.core.codec import State
from gradwire.core.errors import PeerLost
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.limits import Limits
from gradwire.core.node import Node
from gradwire.core.notation import Expression
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec

T = TypeVar("T")
Ability = Literal["mean", "push_pull", "mix", "mix_async"]

# Who has an ability, for messages.
_WHO: dict[Ability, str] = {
    "mean": "allreduce",
    "push_pull": "parameter_server",
    "mix": "gossip(ring)",
    "mix_async": "gossip(ring, adpsgd)",
}


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
    exchange: tuple[State, ...]  # compression state, one per bucket (per piece, with servers)
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # of synchronization and gossip
    loss: Tensor | None = None  # of the last mini-batch
    num_dropped: int = 0  # steps that were dropped because of NaN or infinity
    num_gradients: int = 0  # evaluated so far: fewer than steps where rounds were missed

    def having(self, **changes: Any) -> "Replica":
        return replace(self, **changes)

    def remembering(self, **entries: Tensor) -> "Replica":
        """With these entries of the memory replaced."""
        return replace(self, memory={**self.memory, **entries})


class Pulled(NamedTuple):
    """What came back from the servers."""

    replica: Replica  # with the pulled parameters, and what compression keeps
    clock: int  # the step at which the servers stand
    accepted: bool  # whether what was pushed counted (it did not if it came too late)
    latest: int  # the step at which the one of them stands that is furthest


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

    @property
    def ability(self) -> Ability:
        """What of the architecture is used."""
        ...

    @property
    def key(self) -> Key:
        """Of the run: the same on all workers."""
        ...

    @property
    def num_examples(self) -> Sequence[int]:
        """How many examples each worker trains on."""
        ...

    @property
    def batch_size(self) -> int: ...

    @property
    def buckets(self) -> "Sequence[Bucket]":
        """What is exchanged in one piece, in order."""
        ...

    @property
    def scratch(self) -> dict[str, Any]:
        """What an algorithm that does not pause keeps from step to step and is no value, such as
        exchanges under way."""
        ...

    def lr(self, step: int) -> float:
        """The learning rate of the optimizer in this step."""
        ...

    async def gradient(self, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        """The gradient on this worker's own mini-batch; None if this step is to be dropped."""
        ...

    async def mean_gradient(
        self, replica: Replica, step: int, *, scale: float = 1.0
    ) -> tuple[Tensor | None, Replica]:
        """The mean gradient of all workers, times `scale`; None if this step is to be dropped.

        It is what is exchanged that is scaled, and what compression keeps of it.
        """
        ...

    async def mean(
        self,
        x: Tensor,
        replica: Replica,
        step: int,
        *,
        buckets: Sequence[int] | None = None,
        members: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, Replica]:
        """The mean of a vector like the parameters; None if this step is to be dropped.

        Of some `buckets` only (by number; the result has these, one after the other), among some
        `members` only.
        """
        ...

    async def mean_of_some(
        self, x: Tensor, speaks: bool, replica: Replica, step: int
    ) -> tuple[Tensor, Tensor, Replica]:
        """The sum of the vectors of those that speak, divided by the number of all workers.

        Also what the others heard of this one's. Those that do not speak send one byte per bucket.
        """
        ...

    async def heard(self, x: Tensor, replica: Replica, step: int) -> Tensor:
        """What the others would hear of x if this one spoke, for those who must know before."""
        ...

    async def exact_mean(self, x: Tensor, name: str) -> Tensor:
        """The mean of a vector that is not compressed."""
        ...

    async def fetch(self, x: Tensor, holders: Mapping[int, int], name: str) -> Tensor:
        """Ranks that are keys of `holders` get x from the rank that is the value. All call it."""
        ...

    async def update(
        self, replica: Replica, gradient: Tensor, step: int, *, shared: bool
    ) -> Replica:
        """One step of the optimizer; `shared`: all workers do this on the same values."""
        ...

    async def push_pull(self, x: Tensor, replica: Replica, step: int) -> Pulled:
        """Pushes a vector to the servers and waits for the model they answer with."""
        ...

    async def push_pull_gradient(self, replica: Replica, step: int) -> Pulled | None:
        """The same with the gradient, each part as soon as it is there; None if it is dropped.

        On servers nonfinite="skip" drops no step: a gradient that is not finite is pushed as zero,
        since the servers wait for it and nobody else knows. So it is with `push_pull` and `push`.
        """
        ...

    async def push(self, x: Tensor, replica: Replica, step: int) -> Replica:
        """Pushes a vector to the servers; they do not answer."""
        ...

    async def pull(self, replica: Replica, step: int) -> Pulled:
        """The servers' model, when they have it for this step."""
        ...

    @property
    def mixing(self) -> "Mixing":
        """The neighbours, where the architecture is one of gossip."""
        ...


class Push(NamedTuple):
    """A worker's vector for one shard, as the server heard it."""

    rank: int
    step: int
    x: Tensor  # [shard]
    wants_answer: bool


class Pull(NamedTuple):
    rank: int
    step: int


class Left(NamedTuple):
    """A worker was lost."""

    rank: int


class Joined(NamedTuple):
    """A worker came, or came back. It will pull."""

    rank: int


class TimedOut(NamedTuple):
    """Nothing came in time."""


Event = Push | Pull | Left | Joined | TimedOut


class Server(Protocol):
    """What a synchronization algorithm can do on a server, which holds one shard of the model."""

    @property
    def num_workers(self) -> int: ...

    @property
    def members(self) -> frozenset[int]:
        """The workers that are there."""
        ...

    @property
    def key(self) -> Key: ...

    @property
    def num_examples(self) -> Sequence[int]: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def memory(self) -> dict[str, Any]:
        """What the algorithm keeps from one event to the next; empty at first."""
        ...

    params: Tensor  # [shard]: what is answered

    def lr(self, step: int) -> float: ...

    async def event(self, timeout_s: float | None = None) -> Event:
        """Waits for what happens next."""
        ...

    async def now(self) -> float:
        """The time, in seconds, from which to count timeouts."""
        ...

    async def lost(self, rank: int) -> PeerLost:
        """What to raise where nobody can go on without this worker."""
        ...

    async def update(self, gradient: Tensor, step: int, lr_factor: float = 1.0) -> None:
        """One step of the optimizer on the shard."""
        ...

    async def mean(self, vectors: Sequence[Tensor]) -> Tensor:
        """The mean of some, added in order."""
        ...

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Other work on the shard: a pure function."""
        ...

    async def answer(
        self, rank: int, clock: int, *, accepted: bool = True, params: Tensor | None = None
    ) -> None:
        """Sends the shard (or these parameters in its place) to a worker that waits for it."""
        ...

    def note(self, name: str, value: float) -> None:
        """A figure for the report, such as the staleness of a gradient."""
        ...


class Counts(NamedTuple):
    """Of all values of a figure."""

    total: float
    number: int
    most: float


class Synchronization(Expression, ABC):
    """When workers agree."""

    # What is averaged: with gradients the optimizer comes after, with walks it came before.
    exchanges: Literal["gradients", "walks"] = "gradients"
    # Whether it is changes of what was heard before that travel (`mean_of_some`).
    sends_changes: bool = False
    # How it is written where a run has few steps (`gradwire matrix`); empty: the first example.
    short_examples: ClassVar[tuple[str, ...]] = ()

    @property
    def needs(self) -> tuple[Ability, ...]:
        """The abilities of an architecture it can be built on, the preferred one first."""
        return ("mean",)

    @property
    def pauses(self) -> bool:
        """Whether between two steps all workers stand at the same step and nothing is under way."""
        return True

    @property
    def rounds_are_steps(self) -> bool:
        """Whether a round among neighbours ends in the step in which it began."""
        return True

    def check(self, num_workers: int, num_buckets: int) -> None:
        """Refuses what does not go with so many workers or pieces."""

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        """What the algorithm keeps with each replica."""
        return {}

    def counts(self, memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Counts]:
        """Figures for the report that workers keep in their memories, by name."""
        return {}

    def agreed(self, replica: Replica) -> Tensor:
        """The parameters that the workers agreed on last: the model to evaluate and keep."""
        return replica.params

    def newest(self, replicas: Sequence[Replica]) -> Replica:
        """The one of them that has the model the workers agreed on last."""
        return replicas[0]

    @abstractmethod
    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        """One training step of one worker."""

    async def resume(self, worker: Worker, pulled: Pulled) -> tuple[Replica, int]:
        """How a worker that came (back) to servers goes on after its first pull, and its step."""
        return pulled.replica, pulled.clock

    async def serve(self, server: Server) -> None:
        """The program of a server, for algorithms that use push_pull; it never ends."""
        raise NotImplementedError(f"{self!r} has no server")


class Architecture(Expression, ABC):
    """Who talks to whom."""

    # How it is written where every one of them runs (`gradwire matrix`); empty: the first example.
    short_examples: ClassVar[tuple[str, ...]] = ()

    @property
    def offers(self) -> tuple[Ability, ...]:
        return ("mean",)

    @property
    def num_servers(self) -> int:
        """How many nodes hold the model that are not workers."""
        return 0

    @property
    def num_others(self) -> int:
        """How many nodes there are besides the workers, servers among them: they come first."""
        return 0

    @property
    def squeezes_answers(self) -> bool:
        """Whether servers answer with compressed changes of the model."""
        return False

    def check(self, num_workers: int) -> None:
        """Refuses a number of workers that it cannot connect."""

    def check_compression(self, compression: Reducer, spec: Spec) -> None:
        """Refuses what neighbours cannot exchange a model of this spec with, where it mixes."""

    @abstractmethod
    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        """The collectives of this architecture, for one tensor; among some of the workers."""

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        """What it keeps with each replica."""
        return {}

    def counts(self, memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Counts]:
        """Figures for the report that workers keep in their memories, by name."""
        return {}

    def describe(self, num_workers: int) -> dict[str, str]:
        """Lines for the table of a run: what it is called, what it is."""
        return {}

    def owed(self, replica: Replica) -> Tensor | None:
        """What of its model a worker has not told anyone yet, [d]; None if nothing is kept back."""
        return None

    def mixing(self, node: Node, compression: Reducer, key: Key) -> "Mixing":
        """One worker among its neighbours, where it offers to mix.

        The compression is one that `check_compression` let pass.
        """
        raise NotImplementedError(f"{self!r} has no neighbours")

    def daemon(
        self, node: Node, keep: dict[Any, Any], limits: Limits | None = None
    ) -> Coroutine[Any, Any, None]:
        """The program of a node that is no worker, where no algorithm has one of its own.

        What it must remember from one segment of a run to the next is in `keep`. `limits` says
        which tensors the workers exchange, so that it can refuse others.
        """
        raise NotImplementedError(f"{self!r} has workers only")

    def forget_members(self, keep: dict[Any, Any]) -> None:
        """Drops from `keep` who was lost: it goes on in another job, whose members are new."""


class Mixing(Protocol):
    """One worker among its neighbours: how it averages with them."""

    async def attend(self, replica: Replica, step: int) -> None:
        """In a step without `before`: from here on newcomers can be told where training stands."""
        ...

    async def before(self, replica: Replica, step: int, period: int = 1) -> Replica:
        """At the start of a round of so many steps, before the first gradient of it."""
        ...

    async def after(self, replica: Replica, walk: Tensor, step: int) -> Replica:
        """At the end of a round: `replica` is as `before` left it, `walk` is what the optimizer
        added to its parameters since."""
        ...

    async def miss(self, step: int) -> None:
        """In place of `after`, if the round that ends with this step began without this worker."""
        ...

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        """One training step without rounds ("mix_async")."""
        ...

    async def rejoin(self, replica: Replica) -> tuple[Replica, int]:
        """Where a worker that comes (back) starts: a neighbour's model, and the next step."""
        ...


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


def ability_of(synchronization: Synchronization, architecture: Architecture) -> Ability:
    """What the algorithm uses of the architecture; refuses a pair that makes no sense."""
    offers = architecture.offers
    # Servers that only form means would leave it to workers to hand the model on to each other.
    would_hold = synchronization.needs[0] == "push_pull" and architecture.num_servers > 0
    for need in synchronization.needs:
        if need in offers and not (need == "mean" and would_hold):
            return need
    needs = " or ".join(synchronization.needs)
    others = ", ".join(_WHO[need] for need in synchronization.needs)
    raise ValueError(
        f"{synchronization!r} needs an architecture with {needs}; {architecture!r} offers "
        f"{', '.join(offers)}.{_why(synchronization, offers)} Try {others}."
    )


def _why(synchronization: Synchronization, offers: Sequence[Ability]) -> str:
    """Why there is no such pair (Tang et al. 2020, Table 5, marks these with a dash)."""
    needs = synchronization.needs
    if "push_pull" in needs and "mean" in needs and "mean" in offers:
        return ' Where there are servers they hold its model: leave out optimizer="worker".'
    if "mix" in needs and "mix_async" in offers:
        return " Its workers average whenever they like, not in rounds."
    if "mix_async" in needs and "mix" in offers:
        return " Its rounds wait for all neighbours."
    if "mean" in needs and offers == ("push_pull",):
        return ' Its servers hold the model: leave out optimizer="server".'
    if "push_pull" in needs and "mean" in offers:
        return " A collective mean needs everyone, so nobody can be ahead or left out."
    if "push_pull" in needs and ("mix" in offers or "mix_async" in offers):
        return " Among neighbours nobody holds the model that others could be ahead of."
    return " Neighbours agree on no common model."
