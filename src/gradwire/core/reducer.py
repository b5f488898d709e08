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
from gradwire.core.errors import WireError
from gradwire.core.group import Group, is_half, mean_in_order
from gradwire.core.key import Key
from gradwire.core.memory import Memories, Memory, Role, Roles, inside, named_vectors, replaced
from gradwire.core.node import Node
from gradwire.core.notation import notation_name
from gradwire.core.payload import Payload
from gradwire.core.ramp import at, ramps, settled
from gradwire.core.spec import Spec

# The route on which the owners of shards answer with the mean as it is, not encoded again.
ONE_WAY = "one_way"

_AS_BEFORE = 0  # the one byte of a worker that has nothing to say; every payload is longer

# Below this many elements per shard the header of each shard's payload would count.
_MIN_SHARD = 1 << 14


class Outbox(Group):
    """A group of one, in which a worker leaves its messages for a server that decodes them.

    The mean that comes back is meaningless: nobody asks for the mean of one.
    """

    def __init__(self, node: Node, label: str) -> None:
        super().__init__(node, label, "gather", (node.rank,))
        self.messages: list[Tensor] = []

    async def all_to_all(self, messages: Sequence[Tensor]) -> list[Tensor]:
        self.messages += messages
        return list(messages)


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

    @property
    def one_way(self) -> bool:
        """Whether one worker alone can tell one receiver, who keeps nothing: see `Outbox`."""
        return False

    @property
    def num_messages(self) -> int:
        """How many messages it leaves in an `Outbox`, if it is `one_way`."""
        return 1

    def heard(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        """What a worker said through an `Outbox`, if it is `one_way`; `key` is the sender's."""
        raise TypeError(f"{self!r} needs all workers at once")

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
        statistic = await group.node.call(_statistic, codec, x, residual)
        if statistic is not None:
            codec = codec.agreed(await group.max(statistic))
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
            _encode, codec, x, residual, state["codec"], key
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
        return _decode(codec, spec, key, messages[-1])

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
        encoded = await node.call(_encode_shards, codec, shards, kept, old["shards"], keys)
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
            _decode_shards, codec if squeezes else None, specs, server, tuple(answers), owners
        )
        scatter = {"shards": tuple(inner for _, _, inner in encoded), "owned": owned}
        lost = [piece for _, piece, _ in encoded if piece is not None]
        return Reduced(
            whole.reshape(x.shape),
            partial(_decode_own, codec, Spec.of(x), specs, keys, payloads),
            {**state, "scatter": scatter},
            torch.cat(lost).reshape(x.shape) if lost else None,
        )


async def mean_of_some(
    codec: Codec, x: Tensor, speaks: bool, state: State, key: Key, group: Group
) -> Reduced:
    """The mean over the group, to which those that do not speak send one byte, and add zero.

    `state` is that of `lift(codec)`. Payloads are gathered, whatever could be added on the way: a
    sum needs everyone. Servers, where there are some, add up what comes for each shard and answer
    with the mean as it is.
    """
    node, served = group.node, group.owners != group.members
    num_shards = len(group.owners) if served and not codec.layered else 1
    if num_shards == 1:  # whole, with the layers that may lie in it
        shards: Sequence[Tensor] = (x,)
        keys = [key]
        specs: tuple[Spec, ...] = (replace(Spec.of(x), tensors=state.get("tensors", ())),)
        old: Sequence[State] = (state["codec"],)
    else:
        shards = x.reshape(-1).tensor_split(num_shards)
        keys = [key.child(f"shard {i}") for i in range(num_shards)]
        specs = tuple(Spec.of(shard) for shard in shards)
        old = (state["scatter"] or {}).get("shards") or [codec.init(spec) for spec in specs]
    messages = [torch.full((1,), _AS_BEFORE, dtype=torch.uint8, device=x.device)] * num_shards
    own = partial(_zeros, Spec.of(x), x.device)
    new = tuple(old)
    if speaks:
        none = [None] * num_shards
        encoded = await node.call(_encode_shards, codec, shards, none, old, keys)
        payloads = [payload for payload, _, _ in encoded]
        messages = [payload.buffer for payload in payloads]
        new = tuple(inner for _, _, inner in encoded)
        own = partial(_decode_own, codec, Spec.of(x), specs, keys, payloads)
    jobs = [
        MeanOfHeard(codec, spec, own_key.shared(), group.members)
        for spec, own_key in zip(specs, keys)
    ]
    if num_shards > 1:
        answers, _ = await group.at_owners(messages, jobs, None)
    elif served:
        answers = [await group.at_owner(messages[0], jobs[0])]
    else:
        gathered = tuple(await group.all_gather(messages[0]))
        answer = await node.share(_mean_of_heard, jobs[0], gathered)
        answers = [answer]
    mean = await node.share(_answered, specs, tuple(answers))
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
        return lift(settled(self.compression)).momentum_lives

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


@dataclass(frozen=True)
class MeanOfCoded:
    """The job of a shard's owner: average the payloads, and encode the mean again.

    It feeds its own error back, unless that error need not die out: the feedback of an unbiased
    codec of large variance grows without bound. Without `squeezes` it answers with the mean.
    """

    codec: Codec
    spec: Spec
    key: Key  # of the members, for this shard
    members: tuple[int, ...]
    owner_key: Key
    squeezes: bool

    def run(self, messages: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        codec = self.codec
        mean = _mean_of_decoded(codec, self.spec, self.key, messages, self.members)
        if not self.squeezes:
            return mean, None
        if state is None:
            feeds_back = codec.guarantee(self.spec).contracts
            residual = torch.zeros_like(mean) if feeds_back else None
            state = {"codec": codec.init(self.spec), "residual": residual}
        payload, lost, inner = _encode(
            codec, mean, state["residual"], state["codec"], self.owner_key
        )
        return payload.buffer, {"codec": inner, "residual": lost}


@dataclass(frozen=True)
class MeanOfHeard:
    """The mean of payloads, some of which are the one byte of those that have nothing to say."""

    codec: Codec
    spec: Spec
    key: Key
    members: tuple[int, ...]

    def run(self, messages: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        codec, spec, decoded = self.codec, self.spec, []
        for rank, message in zip(self.members, messages):
            if message.numel() != 1:
                payload = codec.unpack(message, spec)
                decoded.append(codec.decode(payload, spec, self.key.private(rank)))
            elif int(message[0]) != _AS_BEFORE:
                raise WireError(
                    f"rank {rank} sent the byte {int(message[0])}, expected {_AS_BEFORE}"
                )
        if not decoded:  # the answer is as short as the question
            return messages[0], None
        return mean_in_order(decoded, len(messages)), None


def _mean_of_heard(job: MeanOfHeard, messages: tuple[Tensor, ...]) -> Tensor:
    return job.run(messages, None)[0]


def _answered(specs: tuple[Spec, ...], answers: tuple[Tensor, ...]) -> Tensor:
    """The whole of what the owners of shards answered, which may be that nobody spoke."""
    pieces = [
        _zeros(spec, answer.device) if answer.dtype == torch.uint8 else answer
        for spec, answer in zip(specs, answers)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _zeros(spec: Spec, device: torch.device) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def _values(payload: Payload) -> Tensor:
    return payload.parts["values"]


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
    codec: Codec, spec: Spec, specs: Sequence[Spec], keys: list[Key], payloads: list[Payload]
) -> Tensor:
    pieces = [codec.decode(*shard).reshape(-1) for shard in zip(payloads, specs, keys)]
    return torch.cat(pieces).reshape(spec.shape)


def _decode_shards(
    codec: Codec | None,
    specs: tuple[Spec, ...],
    key: Key,
    buffers: tuple[Tensor, ...],
    senders: tuple[int, ...],
) -> Tensor:
    if codec is None:  # they are the shards themselves
        return torch.cat(list(buffers))
    pieces = [
        _decode(codec, spec, key.private(rank), buffer)
        for rank, spec, buffer in zip(senders, specs, buffers)
    ]
    return torch.cat(pieces)
