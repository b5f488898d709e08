"""`lift`: every compression as a reducer, by the cheapest road that a codec's algebra allows.

- LINEAR: the `values` of all payloads are averaged by an all-reduce and decoded once.
- MERGE: payloads merge pairwise up a tree.
- OPAQUE, gather: everyone sends its payload to everyone, who decode and average.
- OPAQUE, scatter: shards are encoded and sent to their owner, who averages them, encodes the
  mean again with an error feedback of its own, and sends it to everyone. 2(n-1)/n payloads
  leave each node instead of n-1 (Tang et al. 2019, DoubleSqueeze, with n servers).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.codec import Algebra, Codec, Compression, Kind, State
from gradwire.core.coded import (
    MeanOfCoded,
    MergeOfCoded,
    decode,
    decode_own,
    decode_shards,
    decode_values,
    encode,
    encode_shards,
    mean_of_decoded,
    statistic,
    values,
)
from gradwire.core.errors import WireError
from gradwire.core.group import Group, is_half
from gradwire.core.key import Key
from gradwire.core.memory import Memories, Memory, Role
from gradwire.core.ramp import at, ramps, settled
from gradwire.core.reducer import Outbox, Reduced, Reducer
from gradwire.core.spec import Spec

# The route on which the owners of shards answer with the mean as it is, not encoded again.
ONE_WAY = "one_way"

# Below this many elements per shard the header of each shard's payload would count.
_MIN_SHARD = 1 << 14


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
    if route == "auto":
        return size >= 3 and numel >= size * _MIN_SHARD
    return route in ("scatter", ONE_WAY)


@dataclass(frozen=True, repr=False)
class Lifted(Reducer):
    """A codec as a reducer."""

    codec: Codec

    @property
    def one_way(self) -> bool:
        return True

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
        shared = await group.node.call(statistic, codec, x, residual)
        if shared is not None:
            codec = codec.agreed(await group.max(shared))
        if isinstance(group, Outbox):
            return await self._push(codec, x, state, key, group, residual)
        opaque = codec.algebra is Algebra.OPAQUE
        # Among some workers a rank owns another shard each time, and would feed back to it what it
        # owes to the last one; servers always own the same.
        settled_owners = group.is_everyone or group.owners != group.members
        may_scatter = opaque and not codec.layered and settled_owners
        if may_scatter and scatters(group.route, group.size, x.numel()):
            return await self._scatter(codec, x, state, key, group, residual)
        node, spec = group.node, replace(Spec.of(x), tensors=state.get("tensors", ()))
        is_sent = codec.algebra is not Algebra.LINEAR or group.exact
        payload, lost, inner = await node.call(
            encode, codec, x, residual, state["codec"], key, is_sent
        )
        own = partial(codec.decode, payload, spec, key)
        state = {**state, "codec": inner}
        if codec.algebra is Algebra.LINEAR and not (group.exact and is_half(values(payload))):
            averaged = await group.mean(values(payload))
            mean = await node.share(decode_values, codec, spec, key.shared(), averaged)
        elif codec.algebra is Algebra.MERGE:
            tree = MergeOfCoded(codec, spec, group.size)
            merged = await group.reduce_tree(payload.buffer, tree)
            mean = await node.share(decode, codec, spec, key.shared(), merged)
        else:
            buffers = tuple(await group.all_gather(payload.buffer))
            mean = await node.share(
                mean_of_decoded, codec, spec, key.shared(), buffers, group.members
            )
        return Reduced(mean, own, state, lost)

    @property
    def num_messages(self) -> int:
        return 2 if self.codec.shares else 1  # the statistic comes first

    async def _push(
        self,
        codec: Codec,
        x: Tensor,
        state: State,
        key: Key,
        outbox: Outbox,
        residual: Tensor | None,
    ) -> Reduced:
        spec = replace(Spec.of(x), tensors=state.get("tensors", ()))
        payload, lost, inner = await outbox.node.call(
            encode, codec, x, residual, state["codec"], key
        )
        await outbox.all_gather(payload.buffer)
        own = partial(codec.decode, payload, spec, key)
        return Reduced(x, own, {**state, "codec": inner}, lost)

    def heard(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        codec = self.codec
        if len(messages) != self.num_messages:
            raise WireError(f"{codec!r}: {len(messages)} messages, expected {self.num_messages}")
        if codec.shares:
            codec = codec.agreed(messages[0])
        return decode(codec, spec, key, messages[-1])

    def remembered(self, states: Sequence[State], spec: Spec) -> dict[str, Memory]:
        owned = [state["scatter"] and state["scatter"]["owned"] for state in states]
        owed = [kept and kept["residual"] for kept in owned]
        if any(piece is None for piece in owed):
            return {}
        return {"server": Memory(Role.SERVER, (torch.cat(owed),))}

    def restored(self, states: Sequence[State], memories: Memories, spec: Spec) -> list[State]:
        if "server" not in memories:
            return list(states)
        pieces = memories["server"].vectors[0].tensor_split(len(states))
        specs = [Spec.of(piece) for piece in pieces]
        shards = tuple(self.codec.init(spec) for spec in specs)
        return [
            {
                **state,
                "scatter": {
                    "shards": shards,
                    "owned": {"codec": self.codec.init(Spec.of(piece)), "residual": piece},
                },
            }
            for state, piece in zip(states, pieces)
        ]

    async def _scatter(
        self, codec: Codec, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None
    ) -> Reduced:
        node, owners = group.node, group.owners
        num_shards = len(owners)
        shards = x.reshape(-1).tensor_split(num_shards)
        kept = (
            [None] * num_shards
            if residual is None
            else residual.reshape(-1).tensor_split(num_shards)
        )
        specs = tuple(Spec.of(shard) for shard in shards)
        keys = [key.child(f"shard {i}") for i in range(num_shards)]
        server = key.child("server").shared()
        old = state["scatter"] or {"shards": tuple(codec.init(spec) for spec in specs)}
        encoded = await node.call(encode_shards, codec, shards, kept, old["shards"], keys)
        payloads = [payload for payload, _, _ in encoded]
        squeezes = group.route != ONE_WAY
        jobs = [
            MeanOfCoded(codec, spec, own.shared(), group.members, server.private(owner), squeezes)
            for spec, own, owner in zip(specs, keys, owners)
        ]
        answers, owned = await group.at_owners(
            [payload.buffer for payload in payloads], jobs, old.get("owned")
        )
        whole = await node.share(
            decode_shards, codec if squeezes else None, specs, server, tuple(answers), owners
        )
        scatter = {"shards": tuple(inner for _, _, inner in encoded), "owned": owned}
        lost = [piece for _, piece, _ in encoded if piece is not None]
        return Reduced(
            whole.reshape(x.shape),
            partial(decode_own, codec, Spec.of(x), specs, keys, payloads),
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

    @property
    def heavy_ball(self) -> tuple[float, bool] | None:
        own = self.compression
        return own.heavy_ball if isinstance(own, Reducer) else None

    @property
    def one_way(self) -> bool:
        return lift(settled(self.compression)).one_way

    @property
    def num_messages(self) -> int:
        return lift(settled(self.compression)).num_messages

    def heard(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        return self.at(key.step).heard(messages, spec, key)

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
