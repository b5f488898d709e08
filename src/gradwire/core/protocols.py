"""The three other dimensions, and what they may ask of one another.

Synchronization says when workers agree, architecture who talks to whom, scheduling when each
part of a gradient travels, compression (codec, reducer) what travels. None of them imports
another: `training/worker.py` is where the four meet. Authors find all names here; what a worker and
a server can do is in `core/participants.py`, what a worker holds in `core/replica.py`.

What an architecture can do has a name, its ability:
- "mean": an exact mean over all workers, which all of them form together;
- "push_pull": servers hold the model; a worker pushes to them and pulls from them on its own;
- "mix": averages with the neighbours, in rounds;
- "mix_async": averages with one neighbour at a time, whenever a worker likes.
"""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor

from gradwire.core.group import Gate, Group
from gradwire.core.key import Key
from gradwire.core.layout import NodeLayout
from gradwire.core.limits import Limits
from gradwire.core.node import Node
from gradwire.core.notation import Expression
from gradwire.core.participants import Ability as Ability
from gradwire.core.participants import Event as Event
from gradwire.core.participants import Joined as Joined
from gradwire.core.participants import Left as Left
from gradwire.core.participants import Mixing as Mixing
from gradwire.core.participants import Pull as Pull
from gradwire.core.participants import Pulled as Pulled
from gradwire.core.participants import Push as Push
from gradwire.core.participants import Server as Server
from gradwire.core.participants import TimedOut as TimedOut
from gradwire.core.participants import Worker as Worker
from gradwire.core.profile import Profile
from gradwire.core.reducer import Reducer
from gradwire.core.replica import Bucket as Bucket
from gradwire.core.replica import Replica as Replica
from gradwire.core.spec import Spec

_EXAMPLES: dict[Ability, str] = {  # of architectures that offer an ability, for messages
    "mean": "allreduce",
    "push_pull": "parameter_server",
    "mix": "gossip(ring)",
    "mix_async": "gossip(ring, adpsgd)",
}


class Counts(NamedTuple):
    """Of all values of a figure."""

    total: float
    number: int
    most: float


class Synchronization(Expression, ABC):
    """When workers agree."""

    # What is averaged: with gradients the optimizer comes after, with walks it came before.
    exchanges: Literal["gradients", "walks"] = "gradients"
    # Whether messages are changes relative to what was decoded before (`mean_of_some`).
    sends_changes: bool = False
    # Whether each step is one `mean_step`, so that the next one may start before its end.
    steps_on_mean: ClassVar[bool] = False
    # How it is written where a run has few steps (`gradwire matrix`); empty: the first example.
    short_examples: ClassVar[tuple[str, ...]] = ()

    @property
    def needs(self) -> tuple[Ability, ...]:
        """The abilities of an architecture it can be built on, the preferred one first."""
        return ("mean",)

    @property
    def pauses(self) -> bool:
        """Whether all workers are at the same step between two steps, with nothing under way."""
        return True

    @property
    def rounds_are_steps(self) -> bool:
        """Whether a round among neighbours ends in the step in which it began."""
        return True

    @property
    def keeps_unsent(self) -> bool:
        """Whether workers keep in their models what compression leaves out (`mean_and_own`)."""
        return False

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
        """The replica and step with which a late joiner continues after its first pull."""
        return pulled.replica, pulled.clock

    async def serve(self, server: Server) -> None:
        """The program of a server, for algorithms that use push_pull; it never ends."""
        raise NotImplementedError(f"{self!r} has no server")


class Architecture(Expression, ABC):
    """How nodes are connected."""

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
        """How many nodes are not workers: the servers, and a scheduler."""
        return 0

    @property
    def compresses_answers(self) -> bool:
        """Whether servers answer with compressed changes of the model."""
        return False

    def layout(self, num_workers: int) -> NodeLayout:
        """The roles of all nodes of a job with so many workers."""
        return NodeLayout(num_workers, self.num_servers, self.num_others - self.num_servers)

    def check(self, num_workers: int) -> None:
        """Refuses a number of workers that it cannot connect."""

    def check_compression(self, compression: Reducer, spec: Spec) -> None:
        """Refuses a compression with which neighbours cannot exchange a model of this spec."""

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
        """The part of its model that a worker has not sent yet, [d]; None if there is none."""
        return None

    def mixing(self, node: Node, compression: Reducer, key: Key) -> Mixing:
        """One worker among its neighbours, if it offers to mix.

        `check_compression` has accepted the compression.
        """
        raise NotImplementedError(f"{self!r} has no neighbours")

    def daemon(
        self, node: Node, keep: dict[Any, Any], limits: Limits | None = None
    ) -> Coroutine[Any, Any, None]:
        """The program of a node that is no worker, if the algorithm has none of its own.

        `keep` holds its memory from one segment of a run to the next. `limits` has the tensors that
        the workers exchange, so that it can refuse others.
        """
        raise NotImplementedError(f"{self!r} has workers only")

    def forget_members(self, keep: dict[Any, Any]) -> None:
        """Drops lost workers from `keep`, for another job with new members."""


class Backward(Protocol):
    """A gradient in the making: what a schedule overlaps communication with."""

    @property
    def node(self) -> Node:
        """To start programs on, one for each bucket under way."""
        ...

    @property
    def profile(self) -> Profile:
        """How the time divides among layers."""
        ...

    async def whole(self) -> Tensor:
        """Waits for the backward pass to end: the flat gradient."""
        ...

    async def ready(self, bucket: Bucket) -> Tensor:
        """Waits for the gradient of a bucket, a slice of the flat one."""
        ...


class Reduce(Protocol):
    """Exchanges a bucket."""

    def __call__(
        self, bucket: Bucket, x: Tensor, gate: Gate | None = None
    ) -> Coroutine[Any, Any, None]:
        """`gate` is awaited between the two phases of an exchange that has two: when the mean of
        a shard is there, and before it goes to all."""
        ...


class Scheduling(Expression, ABC):
    """When each part of a gradient travels."""

    @property
    def overlaps(self) -> bool:
        """Whether buckets travel while the backward pass goes on."""
        return False

    @property
    def overlaps_forward(self) -> bool:
        """Whether the next forward pass starts while buckets are still under way."""
        return False

    @property
    def has_priorities(self) -> bool:
        """Whether some buckets leave before others that wait for the network."""
        return False

    @property
    def needs_prices(self) -> bool:
        """Whether buckets or their order depend on what an exchange costs."""
        return False

    def resolve(self, tensors: Sequence[Bucket], profile: Profile) -> "Scheduling":
        """With everything decided that depends on the profile, to be written into the record."""
        return self

    @abstractmethod
    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        """What is exchanged in one piece, given the model's tensors in order."""

    @abstractmethod
    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        """Calls `reduce` once for every bucket, when its time has come."""


def ability_of(synchronization: Synchronization, architecture: Architecture) -> Ability:
    """What the algorithm uses of the architecture; refuses a pair that makes no sense."""
    offers = architecture.offers
    # With servers that only form means, workers would have to pass the model to each other.
    would_hold = synchronization.needs[0] == "push_pull" and architecture.num_servers > 0
    for need in synchronization.needs:
        if need in offers and not (need == "mean" and would_hold):
            return need
    needs = " or ".join(synchronization.needs)
    others = ", ".join(_EXAMPLES[need] for need in synchronization.needs)
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
