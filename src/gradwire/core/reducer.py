"""Reducers: how n workers come to the mean of their tensors, and `lift` for codecs.

`lift(codec)` takes the cheapest road that the codec's algebra allows:
- LINEAR: the `values` of all payloads are averaged by an all-reduce and decoded once.
- MERGE: payloads merge pairwise up a tree.
- OPAQUE, gather: everyone sends its payload to everyone, who decode and average.
- OPAQUE, scatter: shards are encoded and sent to their owner, who averages them, encodes the
  mean again with an error feedback of its own, and sends it to everyone. 2(n-1)/n payloads
  leave each node instead of n-1 (Tang et al. 2019, DoubleSqueeze, with n servers).
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradwire.core.codec import Algebra, Codec, Compression, Kind, State, check_input, corrected
from gradwire.core.group import Group, is_half
from gradwire.core.key import Key
from gradwire.core.memory import Memories, Memory, Role, Roles, inside, named_vectors, replaced
from gradwire.core.notation import notation_name
from gradwire.core.payload import Payload
from gradwire.core.ramp import at, ramps, settled
from gradwire.core.spec import Spec

# Below this many elements per shard the header of each shard's payload would count.
_MIN_SHARD = 1 << 14


@dataclass(frozen=True, slots=True)
class Reduced:
    mean: Tensor  # what every rank now holds
    # What the group heard from me. A function, because few ask, and decoding takes time.
    own: Callable[[], Tensor]
    state: State
    residual: Tensor | None = None  # what was lost of x + residual, if a residual was given


class Reducer(Compression):
    """Averages a tensor over a group. Hyper-parameters only; state is passed in and out."""

    # The entries of its state that are vectors [numel] (or None for zero), see core/memory.py.
    memory: ClassVar[Roles] = {}

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        """Where the momentum of the optimizer must be for this to train.

        "after": on the mean, as without compression; "before": on each worker's gradient, so that
        what is compressed is the velocity; "inside": the method has one of its own.
        """
        return "after"

    @abstractmethod
    def init(self, spec: Spec, size: int) -> State:
        """The state before the first step, in a group of `size`.

        `spec` is that of a flat bucket, with the tensors in it (`spec.layout`). A method that
        works on those keeps them in its state: `mean` sees vectors only.
        """

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

    @abstractmethod
    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        """The mean of x over the group.

        `key` is private to this rank; `key.shared()` is everybody's. With a `residual` (error
        feedback) it is x + residual that is sent, and what is lost of it comes back.
        """


def lift(compression: Compression, steps_per_epoch: float | None = None) -> Reducer:
    """The reducer that averages through a codec; a reducer is returned as it is.

    Where it holds numbers that change with time, it becomes the reducer of each step.
    """
    if ramps(compression):
        return Varying(compression, steps_per_epoch)
    if isinstance(compression, Codec):
        return Lifted(compression)
    assert isinstance(compression, Reducer), f"{compression!r} is neither codec nor reducer"
    return compression


def scatters(route: str, size: int, numel: int) -> bool:
    """Whether OPAQUE payloads take the scatter road. Depends only on what all ranks know.

    Scattering sends 2(n-1)/n payloads against n-1: less from three ranks on, if the shards
    are large enough. It encodes twice, which costs accuracy that gathering does not.
    """
    return route == "scatter" or (route == "auto" and size >= 3 and numel >= size * _MIN_SHARD)


@dataclass(frozen=True, repr=False)
class Lifted(Reducer):
    """A codec as a reducer."""

    codec: Codec

    def __post_init__(self) -> None:
        if self.codec.takes is not Kind.REAL:
            raise ValueError(
                f"{self.codec!r} encodes {self.codec.takes.value}, so it must follow a quantiser. "
                f"Write qsgd(bits=4) >> {self.codec!r}."
            )

    def __repr__(self) -> str:
        return repr(self.codec)

    def init(self, spec: Spec, size: int) -> State:
        # The scatter road adds its own state when it is first taken.
        state = {"codec": self.codec.init(spec), "scatter": None}
        return {**state, "tensors": spec.layout} if self.codec.layered else state

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        codec = self.codec
        if codec.needs_feedback and residual is None:
            raise ValueError(
                f"{codec!r} chooses from what error feedback accumulates: write ef({codec!r})"
            )
        statistic = await group.node.call(_statistic, codec, x, residual)
        if statistic is not None:
            codec = codec.agreed(await group.max(statistic))
        opaque = codec.algebra is Algebra.OPAQUE
        if opaque and not codec.layered and scatters(group.route, group.size, x.numel()):
            return await self._scatter(codec, x, state, key, group, residual)
        node, spec = group.node, replace(Spec.of(x), tensors=state.get("tensors", ()))
        payload, lost, inner = await node.call(_encode, codec, x, residual, state["codec"], key)
        own = partial(codec.decode, payload, spec, key)
        state = {**state, "codec": inner}
        if codec.algebra is Algebra.LINEAR and not (group.exact and is_half(_values(payload))):
            values = await group.mean(_values(payload))
            mean = await node.share(_decode_values, codec, spec, key.shared(), values)
        elif codec.algebra is Algebra.MERGE:
            tree = _Merge(codec, spec, group.size)
            merged = await group.reduce_tree(payload.buffer, tree.merge, tree.settle)
            mean = await node.share(_decode, codec, spec, key.shared(), merged)
        else:
            buffers = tuple(await group.all_gather(payload.buffer))
            mean = await node.share(
                _mean_of_decoded, codec, spec, key.shared(), buffers, group.members
            )
        return Reduced(mean, own, state, lost)

    def remembered(self, states: Sequence[State], spec: Spec) -> dict[str, Memory]:
        owed = [state["scatter"] and state["scatter"]["residual"] for state in states]
        if any(piece is None for piece in owed):
            return {}
        return {"server": Memory(Role.SERVER, (torch.cat(owed),))}

    def restored(self, states: Sequence[State], memories: Memories, spec: Spec) -> list[State]:
        if "server" not in memories:
            return list(states)
        pieces = memories["server"].vectors[0].tensor_split(len(states))
        specs = [Spec.of(piece) for piece in pieces]
        return [
            {**state, "scatter": _shard_states(self.codec, specs, Spec.of(piece), piece)}
            for state, piece in zip(states, pieces)
        ]

    async def _scatter(
        self, codec: Codec, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None
    ) -> Reduced:
        node, size = group.node, group.size
        shards = x.reshape(-1).tensor_split(size)
        kept = [None] * size if residual is None else residual.reshape(-1).tensor_split(size)
        specs = [Spec.of(shard) for shard in shards]
        mine = specs[group.rank]
        keys = [key.child(f"shard {i}") for i in range(size)]
        server = key.child("server")
        # The owner of a shard feeds its own error back, unless that error need not die out:
        # the feedback of an unbiased codec of large variance grows without bound.
        feeds_back = codec.guarantee(mine).contracts
        old = state["scatter"] or _shard_states(
            codec, specs, mine, torch.zeros_like(shards[group.rank]) if feeds_back else None
        )
        encoded = await node.call(_encode_shards, codec, shards, kept, old["shards"], keys)
        payloads = [payload for payload, _, _ in encoded]
        received = await group.all_to_all([payload.buffer for payload in payloads])
        mean = await node.call(
            _mean_of_decoded,
            codec,
            mine,
            keys[group.rank].shared(),
            tuple(received),
            group.members,
        )
        payload, server_lost, server_state = await node.call(
            _encode, codec, mean, old["residual"], old["server"], server
        )
        buffers = tuple(await group.all_gather(payload.buffer))
        whole = await node.share(
            _decode_shards, codec, tuple(specs), server.shared(), buffers, group.members
        )
        scatter = {
            "shards": tuple(inner for _, _, inner in encoded),
            "server": server_state,
            "residual": server_lost,
        }
        lost = [piece for _, piece, _ in encoded if piece is not None]
        return Reduced(
            whole.reshape(x.shape),
            partial(_decode_own, codec, Spec.of(x), specs, keys, payloads),
            {**state, "scatter": scatter},
            torch.cat(lost).reshape(x.shape) if lost else None,
        )


@dataclass(frozen=True, repr=False)
class Varying(Reducer):
    """A compression whose numbers change with time: see core/ramp.py."""

    compression: Compression
    steps_per_epoch: float | None = None

    def __repr__(self) -> str:
        return repr(self.compression)

    def at(self, step: int) -> Reducer:
        """What it is in this step."""
        last = max(ramp.last_step(self.steps_per_epoch) for ramp in ramps(self.compression))
        return lift(at(self.compression, min(step, last), self.steps_per_epoch))

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        return lift(settled(self.compression)).momentum_lives

    def check_names(self, names: Sequence[str]) -> None:
        self.at(0).check_names(names)

    def remembered(self, states: Sequence[State], spec: Spec) -> dict[str, Memory]:
        return self.at(0).remembered(states, spec)

    def restored(self, states: Sequence[State], memories: Memories, spec: Spec) -> list[State]:
        return self.at(0).restored(states, memories, spec)

    def init(self, spec: Spec, size: int) -> State:
        state = self.at(0).init(spec, size)
        if _shape(state) != _shape(lift(settled(self.compression)).init(spec, size)):
            raise ValueError(
                f"{self!r}: what it keeps from step to step has another size at the end of the "
                "ramp than at its beginning. Leave that number constant."
            )
        return state

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        return await self.at(key.step).mean(x, state, key, group, residual)


def _shape(state: State) -> object:
    """The structure of a state and the sizes of its tensors."""
    if isinstance(state, Tensor):
        return tuple(state.shape)
    if isinstance(state, Mapping):
        return {name: _shape(value) for name, value in state.items()}
    return tuple(map(_shape, state)) if isinstance(state, tuple | list) else type(state)


@dataclass(frozen=True)
class _Merge:
    """Merges two packed payloads of one codec and tensor."""

    codec: Codec
    spec: Spec
    size: int

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        unpack = self.codec.unpack
        return self.codec.merge(unpack(a, self.spec), unpack(b, self.spec)).buffer

    def settle(self, merged: Tensor) -> Tensor:
        payload = self.codec.unpack(merged, self.spec)
        return self.codec.settle(payload, self.spec, self.size).buffer


def _values(payload: Payload) -> Tensor:
    return payload.parts["values"]


def _shard_states(
    codec: Codec, specs: Sequence[Spec], mine: Spec, residual: Tensor | None
) -> dict[str, State]:
    """The state of the scatter road before its first step."""
    return {
        "shards": tuple(codec.init(spec) for spec in specs),
        "server": codec.init(mine),
        "residual": residual,
    }


def _statistic(codec: Codec, x: Tensor, residual: Tensor | None) -> Tensor | None:
    if not codec.shares:
        return None
    total = corrected(x, residual)
    check_input(codec, total)
    return codec.statistic(total)


def _decode(codec: Codec, spec: Spec, key: Key, buffer: Tensor) -> Tensor:
    return codec.decode(codec.unpack(buffer, spec), spec, key)


def _decode_values(codec: Codec, spec: Spec, key: Key, values: Tensor) -> Tensor:
    assert codec.parts == ("values",), f"{codec!r} is LINEAR but has parts {codec.parts}"
    return codec.join({"values": values}, spec.flat(), key).reshape(spec.shape)


def _mean_of_decoded(
    codec: Codec, spec: Spec, key: Key, buffers: tuple[Tensor, ...], senders: tuple[int, ...]
) -> Tensor:
    payloads = [codec.unpack(buffer, spec) for buffer in buffers]
    return codec.decode_mean(payloads, spec, [key.private(rank) for rank in senders])


def _encode(
    codec: Codec, x: Tensor, residual: Tensor | None, state: State, key: Key
) -> tuple[Payload, Tensor | None, State]:
    """The payload, what was lost if a residual is kept, and the new state."""
    if residual is None:
        payload, state = codec.encode(x, state, key)
        return payload, None, state
    return codec.encode_feedback(x, residual.to(x.device), state, key)


def _encode_shards(codec: Codec, *shards: Sequence[Any]) -> list[tuple[Payload, Any, State]]:
    return [_encode(codec, *shard) for shard in zip(*shards)]


def _decode_own(
    codec: Codec, spec: Spec, specs: list[Spec], keys: list[Key], payloads: list[Payload]
) -> Tensor:
    pieces = [codec.decode(*shard) for shard in zip(payloads, specs, keys)]
    return torch.cat(pieces).reshape(spec.shape)


def _decode_shards(
    codec: Codec,
    specs: tuple[Spec, ...],
    key: Key,
    buffers: tuple[Tensor, ...],
    senders: tuple[int, ...],
) -> Tensor:
    pieces = [
        _decode(codec, spec, key.private(rank), buffer)
        for rank, spec, buffer in zip(senders, specs, buffers)
    ]
    return torch.cat(pieces)
