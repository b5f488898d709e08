"""`lift`: every compression as a reducer, by the cheapest route that a codec's algebra allows.

- LINEAR: the `values` of all payloads are averaged by an all-reduce and decoded once.
- MERGE: payloads merge pairwise up a tree.
- OPAQUE, gather: each worker sends its payload to all, and each decodes and averages.
- OPAQUE, scatter: shards are encoded and sent to their owner, which averages them, encodes the
  mean again with an error feedback of its own, and sends it to everyone. 2(n-1)/n payloads
  leave each node instead of n-1 (Tang et al. 2019, DoubleSqueeze, with n servers).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.codec import Algebra, Codec, Compression, Kind, State
from gradwire.core.coded import (
    NO_NEWS,
    MeanOfCoded,
    MeanOfReceived,
    MergeOfCoded,
    agreed,
    decode,
    decode_own,
    decode_shards,
    decode_values,
    encode,
    encode_shards,
    join_answers,
    mean_of_decoded,
    mean_of_received,
    shards_of,
    statistic,
    values,
    zeros,
)
from gradwire.core.errors import WireError
from gradwire.core.exchange import as_argument
from gradwire.core.fusion import Residual
from gradwire.core.group import Group, is_half
from gradwire.core.key import Key
from gradwire.core.memory import Memories, Memory, Role
from gradwire.core.node import Node
from gradwire.core.payload import Payload
from gradwire.core.ramp import at, at_end, at_start, ramps
from gradwire.core.reducer import Pushed, Reduced, Reducer
from gradwire.core.routes import ONE_WAY, num_sent, scatters
from gradwire.core.spec import Spec


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


@dataclass(frozen=True, repr=False)
class Lifted(Reducer):
    """A codec as a reducer."""

    codec: Codec

    @property
    def can_push(self) -> bool:
        return True

    @property
    def checks_input(self) -> bool:
        return self.codec.traits.statistic is None  # which is sent before

    def codec_at(self, step: int) -> Codec:
        return self.codec

    def __post_init__(self) -> None:
        takes = self.codec.traits.takes
        if takes is not Kind.REAL:
            raise ValueError(
                f"{self.codec!r} encodes {takes.value}, so it must follow a quantiser. "
                f"Write qsgd(bits=4) >> {self.codec!r}."
            )

    def __repr__(self) -> str:
        return repr(self.codec)

    def init(self, spec: Spec, size: int) -> State:
        # The scatter route adds its own state when it is first taken.
        state = {"codec": self.codec.init(spec), "scatter": None}
        return {**state, "tensors": spec.layout} if self.codec.traits.layered else state

    @property
    def is_sparse(self) -> bool:
        return self.codec.traits.sparse

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Residual | None = None
    ) -> Reduced:
        self._check_feedback(residual)
        codec = self.codec
        if codec.traits.statistic is not None:
            shared = await group.node.call(statistic, codec, x, residual)
            if shared is not None:
                codec = agreed(codec, await group.max(shared))
        opaque = codec.algebra is Algebra.OPAQUE
        # Among some workers a rank owns another shard each time, and would feed back to it what it
        # owes to the last one; servers always own the same.
        has_fixed_owners = group.is_everyone or group.owners != group.members
        may_scatter = opaque and not codec.traits.layered and has_fixed_owners
        if may_scatter and scatters(group.route, group.size, x.numel(), num_sent(codec, x)):
            return await self._scatter(codec, x, state, key, group, residual)
        node, spec = group.node, self._spec(x, state)
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
            buffers = as_argument(await group.all_gather(payload.buffer))
            mean = await node.share(
                mean_of_decoded, codec, spec, key.shared(), buffers, group.members
            )
        return Reduced(mean, own, state, lost)

    def _check_feedback(self, residual: Residual | None) -> None:
        if self.codec.traits.needs_feedback and residual is None:
            raise ValueError(
                f"{self.codec!r} chooses from what error feedback accumulates: write "
                f"ef({self.codec!r})"
            )

    def _spec(self, x: Tensor, state: State) -> Spec:
        return Spec(tuple(x.shape), x.dtype, tensors=state.get("tensors", ()))

    @property
    def num_messages(self) -> int:
        return 1 if self.codec.traits.statistic is None else 2  # the statistic comes first

    async def push(
        self, x: Tensor, state: State, key: Key, node: Node, residual: Residual | None = None
    ) -> Pushed:
        self._check_feedback(residual)
        codec, messages = self.codec, []
        shared = await node.call(statistic, codec, x, residual)
        if shared is not None:  # the worker alone decides
            codec = agreed(codec, shared)
            messages.append(shared)
        payload, lost, inner = await node.call(encode, codec, x, residual, state["codec"], key)
        own = partial(codec.decode, payload, self._spec(x, state), key)
        state = {**state, "codec": inner}
        return Pushed((*messages, payload.buffer), own, state, lost)

    def decode_push(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        codec = self.codec
        if len(messages) != self.num_messages:
            raise WireError(f"{codec!r}: {len(messages)} messages, expected {self.num_messages}")
        if len(messages) > 1:
            codec = agreed(codec, messages[0])
        return decode(codec, spec, key, messages[-1])

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        """The payload of x for any receiver, and the new state."""
        payload, inner = self.codec.encode(x, state["codec"], key)
        return payload, {**state, "codec": inner}

    def decoded(self, x: Tensor, state: State, key: Key) -> Tensor:
        """What receivers would decode if x were sent now."""
        payload, _ = self.encode(x, state, key)
        return self.codec.decode(payload, self._spec(x, state), key)

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
        self,
        codec: Codec,
        x: Tensor,
        state: State,
        key: Key,
        group: Group,
        residual: Residual | None,
    ) -> Reduced:
        node, owners = group.node, group.owners
        num_shards = len(owners)
        shards = x.reshape(-1).tensor_split(num_shards)
        kept = shards_of(residual, num_shards)
        specs = tuple(Spec.of(shard) for shard in shards)
        keys = [key.child(f"shard {i}") for i in range(num_shards)]
        server = key.child("server").shared()
        old = state["scatter"] or {"shards": tuple(codec.init(spec) for spec in specs)}
        payloads, lost, new = await node.call(
            encode_shards, codec, shards, kept, old["shards"], keys
        )
        reencodes = group.route != ONE_WAY
        jobs = [
            MeanOfCoded(codec, spec, own.shared(), group.members, server.private(owner), reencodes)
            for spec, own, owner in zip(specs, keys, owners)
        ]
        answers, owned = await group.at_owners(
            [payload.buffer for payload in payloads], jobs, old.get("owned")
        )
        whole = await node.share(
            decode_shards, codec if reencodes else None, specs, server, tuple(answers), owners
        )
        scatter = {"shards": new, "owned": owned}
        return Reduced(
            whole.reshape(x.shape),
            partial(decode_own, codec, Spec.of(x), specs, keys, payloads),
            {**state, "scatter": scatter},
            None if lost is None else lost.reshape(x.shape),
        )

    async def mean_of_some(
        self, x: Tensor, has_news: bool, state: State, key: Key, group: Group
    ) -> Reduced:
        """The mean over the group, to which workers without news send one byte, and add zero.

        Payloads are gathered, whatever could be added on the way: a sum needs everyone. Servers,
        where there are some, add up what comes for each shard and answer with the mean as it is.
        """
        codec, node, served = self.codec, group.node, group.owners != group.members
        num_shards = len(group.owners) if served and not codec.traits.layered else 1
        if num_shards == 1:  # whole, with the layers that may lie in it
            shards: Sequence[Tensor] = (x,)
            keys = [key]
            specs: tuple[Spec, ...] = (self._spec(x, state),)
            old: Sequence[State] = (state["codec"],)
        else:
            shards = x.reshape(-1).tensor_split(num_shards)
            keys = [key.child(f"shard {i}") for i in range(num_shards)]
            specs = tuple(Spec.of(shard) for shard in shards)
            old = (state["scatter"] or {}).get("shards") or [codec.init(spec) for spec in specs]
        messages = [torch.full((1,), NO_NEWS, dtype=torch.uint8, device=x.device)] * num_shards
        own = partial(zeros, Spec.of(x), x.device)
        new = tuple(old)
        if has_news:
            none = [None] * num_shards
            payloads, _, new = await node.call(encode_shards, codec, shards, none, old, keys)
            messages = [payload.buffer for payload in payloads]
            own = partial(decode_own, codec, Spec.of(x), specs, keys, payloads)
        jobs = [
            MeanOfReceived(codec, spec, own_key.shared(), group.members)
            for spec, own_key in zip(specs, keys)
        ]
        if num_shards > 1:
            answers, _ = await group.at_owners(messages, jobs, None)
        elif served:
            answers = [await group.at_owner(messages[0], jobs[0])]
        else:
            gathered = as_argument(await group.all_gather(messages[0]))
            answer = await node.share(mean_of_received, jobs[0], gathered)
            answers = [answer]
        mean = await node.share(join_answers, specs, tuple(answers))
        if num_shards == 1:
            state = {**state, "codec": new[0]}
        else:
            state = {**state, "scatter": {"shards": new, "owned": None}}
        return Reduced(mean.reshape(x.shape), own, state)


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
        return lift(at_end(self.compression)).momentum_lives

    def codec_at(self, step: int) -> Codec | None:
        return self.at(step).codec_at(step)

    def codec_within(self, step: int) -> Codec | None:
        return self.at(step).codec_within(step)

    def ends(self) -> tuple[Reducer, ...]:
        return lift(at_start(self.compression)), lift(at_end(self.compression))

    @property
    def heavy_ball(self) -> tuple[float, bool] | None:
        own = self.compression
        return own.heavy_ball if isinstance(own, Reducer) else None

    @property
    def can_push(self) -> bool:
        return lift(at_end(self.compression)).can_push

    @property
    def num_messages(self) -> int:
        return lift(at_end(self.compression)).num_messages

    async def push(
        self, x: Tensor, state: State, key: Key, node: Node, residual: Tensor | None = None
    ) -> Pushed:
        return await self.at(key.step).push(x, state, key, node, residual)

    def decode_push(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        return self.at(key.step).decode_push(messages, spec, key)

    def check_names(self, names: Sequence[str]) -> None:
        self.at(0).check_names(names)

    def remembered(self, states: Sequence[State], spec: Spec) -> dict[str, Memory]:
        return self.at(0).remembered(states, spec)

    def restored(self, states: Sequence[State], memories: Memories, spec: Spec) -> list[State]:
        return self.at(0).restored(states, memories, spec)

    def init(self, spec: Spec, size: int) -> State:
        state = self.at(0).init(spec, size)
        if _shape(state) != _shape(lift(at_end(self.compression)).init(spec, size)):
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
