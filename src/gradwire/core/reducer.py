"""Reducers: how workers come to the mean of their tensors; `core/lifted.py` has those of codecs."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from gradwire.core.codec import Codec, Compression, State, drops_for_good
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.memory import Memories, Memory, Role, Roles, inside, named_vectors, replaced
from gradwire.core.node import Node
from gradwire.core.notation import notation_name
from gradwire.core.spec import Spec

_OF_CODECS = frozenset(name for name in vars(Codec) if not name.startswith("_"))


@dataclass(frozen=True, slots=True)
class Reduced:
    """What a mean over a group gives each of its workers."""

    mean: Tensor  # what every rank now holds
    # What the group received from this rank. A function, because few ask, and decoding takes time.
    own: Callable[[], Tensor]
    state: State
    residual: Tensor | None = None  # what was lost of x + residual, if a residual was given

    def keeping(self, state: State) -> "Reduced":
        """The same with another state, and what was lost in that."""
        return Reduced(self.mean, self.own, state)


@dataclass(frozen=True, slots=True)
class Pushed:
    """What one worker sends to a server that decodes it, with `Reducer.decode_push`."""

    messages: tuple[Tensor, ...]
    own: Callable[[], Tensor]  # what the server decodes
    state: State
    residual: Tensor | None = None  # as in `Reduced`

    def keeping(self, state: State) -> "Pushed":
        """As that of `Reduced`."""
        return Pushed(self.messages, self.own, state)


def _is_no_codec(reducer: "Reducer") -> str:
    return f"{reducer!r} is a way of averaging among workers, not a codec"


def _asking_for_size(init: Callable[..., State]) -> Callable[..., State]:
    """`init` of a reducer that says so if it is called as that of a codec."""

    @functools.wraps(init)
    def checked(self: "Reducer", spec: Spec, size: int | None = None) -> State:
        if size is None:
            raise ValueError(
                f"{_is_no_codec(self)}: init needs the number of workers. Write init(spec, 4), or "
                f"run it: gradwire.simulate(compression={repr(self)!r})."
            )
        return init(self, spec, size)

    return checked


class Reducer(Compression):
    """Averages a tensor over a group. Hyper-parameters only; state is passed in and out."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "init" in vars(cls):
            setattr(cls, "init", _asking_for_size(vars(cls)["init"]))  # noqa: B010, for mypy

    # The entries of its state that are vectors [numel] (or None for zero), see core/memory.py.
    memory: ClassVar[Roles] = {}

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        """Where the momentum of the optimizer must be for this to train.

        "after": on the mean, as without compression; "before": on each worker's gradient, so that
        what is compressed is the velocity; "inside": the method has one of its own.
        """
        return "after"

    @property
    def heavy_ball(self) -> tuple[float, bool] | None:
        """Its own momentum, and whether that is Nesterov's, if it is what SGD has otherwise."""
        return None

    @abstractmethod
    def init(self, spec: Spec, size: int) -> State:
        """The state before the first step, in a group of `size`.

        `spec` is that of a flat bucket, with the tensors in it (`spec.layout`). A method that
        works on those keeps them in its state: `mean` sees vectors only.
        """

    if not TYPE_CHECKING:  # for a message: type checkers know what a reducer has

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_CODECS:
                message = (
                    f"{_is_no_codec(self)}: it has no {name}. A codec such as topk(0.01) has; a "
                    f"run takes both: gradwire.simulate(compression={repr(self)!r})."
                )
            raise AttributeError(message)

    def __rshift__(self, other: object) -> "Reducer":
        if not isinstance(other, Compression):
            return NotImplemented
        inner = next((getattr(self, f.name) for f in fields(self)), None)  # type: ignore[arg-type]
        hint = f" Write {notation_name(type(self))}({inner!r} >> {other!r})."
        raise ValueError(
            f"{self!r} >> {other!r}: {self!r} is a way of averaging and leaves no values for "
            f"{other!r} to encode." + (hint if isinstance(inner, Codec) else "")
        )

    def check_names(self, names: Sequence[str]) -> None:
        """Refuses a model whose tensors, by name, do not suit it; asks the reducers inside."""
        for field in fields(self):  # type: ignore[arg-type]
            inner = getattr(self, field.name)
            if isinstance(inner, Reducer):
                inner.check_names(names)

    def wrapped(self) -> "Reducer | None":
        """The reducer whose state is under "inner" in this one's."""
        return None

    def remembered(self, states: Sequence[State], spec: Spec) -> dict[str, Memory]:
        """What the states of all ranks hold per element of a bucket, by name."""
        found, inner = named_vectors(self.memory, states, spec), self.wrapped()
        if inner is not None:
            below = inner.remembered([state["inner"] for state in states], spec)
            found |= {f"inner.{name}": memory for name, memory in below.items()}
        owing = next((name for name, m in found.items() if m.role is Role.LEFT), None)
        if owing is not None and "inner.server" in found:
            # The next group may need no servers. What they owe to a mean, all workers owe alike.
            owed = found.pop("inner.server").vectors[0]
            left = found[owing]
            found[owing] = replaced(left, tuple(vector + owed for vector in left.vectors))
        return found

    def restored(self, states: Sequence[State], memories: Memories, spec: Spec) -> list[State]:
        """Fresh states of all ranks, with memories of these names in them."""
        states, inner = [{**state} if self.memory else state for state in states], self.wrapped()
        for rank, state in enumerate(states):
            for name in self.memory.keys() & memories.keys():
                state[name] = memories[name].of(rank).reshape(spec.shape)
        if inner is None:
            return states
        below = inner.restored([s["inner"] for s in states], inside("inner", memories), spec)
        return [{**state, "inner": own} for state, own in zip(states, below)]

    def of_tensors(self, state: State) -> dict[str, Tensor]:
        """What the state has of whole tensors, by name: it goes with them to other buckets."""
        inner = self.wrapped()
        return {} if inner is None else inner.of_tensors(state["inner"])

    def with_tensors(self, state: State, values: Mapping[str, Tensor]) -> State:
        """The state of a bucket, with what other states had of the tensors in it."""
        inner = self.wrapped()
        if inner is None:
            return state
        return {**state, "inner": inner.with_tensors(state["inner"], values)}

    def unfed(self, spec: Spec) -> Compression | None:
        """The part of it that drops something for good, and wants `ef(...)` around it; or None."""
        return None

    @property
    def is_sparse(self) -> bool:
        """Whether some elements are sent, and of others nothing."""
        return False

    @property
    def averages_exactly(self) -> bool:
        """Whether its mean is the mean of what receivers decode of each worker."""
        return False

    def parts_within(self) -> "tuple[Compression, ...]":
        """The compressions that share out its work tensor by tensor; none if it does it itself."""
        return ()

    def codec_at(self, step: int) -> Codec | None:
        """The codec that does all of the work, if it is one codec."""
        return None

    def codec_within(self, step: int) -> Codec | None:
        """The codec inside all wrappers, if there is one."""
        codec, inner = self.codec_at(step), self.wrapped()
        return codec if codec is not None or inner is None else inner.codec_within(step)

    def ends(self) -> "tuple[Reducer, ...]":
        """What it is in the first step, and what in the end, if that is something else."""
        return (self,)

    @property
    def checks_input(self) -> bool:
        """Whether `mean` refuses NaN and infinity before it sends anything."""
        return False

    @property
    def can_push(self) -> bool:
        """Whether a worker's messages can be decoded without state of the receiver: `push`."""
        return False

    @property
    def num_messages(self) -> int:
        """How many messages a `push` has."""
        return 1

    async def push(
        self, x: Tensor, state: State, key: Key, node: Node, residual: Tensor | None = None
    ) -> Pushed:
        """The messages with which one worker sends x, or x + residual, to a server."""
        raise TypeError(f"{self!r} needs all workers at once")

    def decode_push(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        """The tensor that a worker pushed; `key` is the sender's."""
        raise TypeError(f"{self!r} needs all workers at once")

    @abstractmethod
    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        """The mean of x over the group.

        `key` is private to this rank; `key.shared()` is everybody's. With a `residual` (error
        feedback) it is x + residual that is sent, and what is lost of it comes back.
        """


def innermost(compression: Compression) -> Iterator[Compression]:
    """The compressions that do the work: those within, if there are some, or it itself."""
    within = compression.parts_within() if isinstance(compression, Reducer) else ()
    for part in within:
        yield from innermost(part)
    if not within:
        yield compression


def remembering(compression: object) -> Reducer | None:
    """The part of it that keeps something of a vector for the next ones; None if none does."""
    if isinstance(compression, Mapping):
        within = list(compression.values())
    elif isinstance(compression, tuple | list):
        within = list(compression)
    elif not isinstance(compression, Reducer):
        return None
    elif compression.memory:
        return compression
    else:
        within = [getattr(compression, field.name) for field in fields(compression)]  # type: ignore[arg-type]
    return next((part for part in map(remembering, within) if part is not None), None)


def unfed(compression: Compression, spec: Spec) -> Compression | None:
    """The part of it that drops something for good, and wants `ef(...)` around it; or None."""
    if isinstance(compression, Codec):
        return compression if drops_for_good(compression, spec) else None
    assert isinstance(compression, Reducer), f"{compression!r} is neither codec nor reducer"
    return compression.unfed(spec)
