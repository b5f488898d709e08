"""What a synchronization algorithm can ask of a worker and of a server.

`training/worker.py` and `training/server.py` implement both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor

from gradwire.core.errors import PeerLost
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.replica import Bucket, Replica

T = TypeVar("T")
Ability = Literal["mean", "push_pull", "mix", "mix_async"]


class Pulled(NamedTuple):
    """What came back from the servers."""

    replica: Replica  # with the pulled parameters, and what compression keeps
    clock: int  # the step of the servers
    accepted: bool  # whether the push counted (a late one does not)
    latest: int  # the step of the server that is furthest ahead


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
    def buckets(self) -> Sequence[Bucket]:
        """What is exchanged in one piece, in order."""
        ...

    @property
    def scratch(self) -> dict[str, Any]:
        """Objects that an algorithm that does not pause keeps from step to step, such as exchanges
        under way."""
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

    async def mean_step(self, replica: Replica, step: int) -> Replica:
        """A step of the optimizer on the mean gradient of all workers.

        With a schedule that lets the next forward pass start early, the parameters of the result
        may still be under way; they are there when the last step has ended.
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

    async def mean_and_own(
        self, x: Tensor, replica: Replica, step: int
    ) -> tuple[Tensor | None, Tensor | None, Replica]:
        """`mean`, and what the others decoded of this worker's vector; None twice if this step is
        to be dropped. The difference to x is what compression left out."""
        ...

    async def mean_of_some(
        self, x: Tensor, speaks: bool, replica: Replica, step: int
    ) -> tuple[Tensor, Tensor, Replica]:
        """The sum of the vectors of the workers that speak, divided by the number of all workers.

        Also returns what the others decoded of this worker's vector. Workers that do not speak send
        one byte per bucket.
        """
        ...

    async def decoded(self, x: Tensor, replica: Replica, step: int) -> Tensor:
        """What the others would decode if this worker sent x, for decisions before sending."""
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

        With servers, nonfinite="skip" drops no step: a gradient that is not finite is pushed as
        zero, since the servers wait for it. The same holds for `push_pull` and `push`.
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


class Mixing(Protocol):
    """One worker among its neighbours: how it averages with them."""

    async def attend(self, replica: Replica, step: int) -> None:
        """In a step without `before`: from now on late joiners can ask for the current step."""
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


class Push(NamedTuple):
    """A worker's vector for one shard, as the server decoded it."""

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
    """No message came in time."""


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
        """Waits for the next event."""
        ...

    async def now(self) -> float:
        """The time, in seconds, from which to count timeouts."""
        ...

    async def lost(self, rank: int) -> PeerLost:
        """The error to raise if the run cannot continue without this worker."""
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
