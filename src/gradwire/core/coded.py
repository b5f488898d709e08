"""What several workers' payloads come to: decoded and averaged, and the jobs of those who do it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.core.codec import Codec, State, check_input, corrected
from gradwire.core.errors import WireError
from gradwire.core.group import Group, Job, Merging, mean_in_order
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec

_AS_BEFORE = 0  # the one byte of a worker that has nothing to say; every payload is longer


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
        encoded = await node.call(encode_shards, codec, shards, none, old, keys)
        payloads = [payload for payload, _, _ in encoded]
        messages = [payload.buffer for payload in payloads]
        new = tuple(inner for _, _, inner in encoded)
        own = partial(decode_own, codec, Spec.of(x), specs, keys, payloads)
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


@dataclass(frozen=True)
class MergeOfCoded(Merging):
    """Merges two packed payloads of one codec and tensor."""

    codec: Codec
    spec: Spec
    size: int

    def merge(self, a: Tensor, b: Tensor, /) -> Tensor:
        unpack = self.codec.unpack
        return self.codec.merge(unpack(a, self.spec), unpack(b, self.spec)).buffer

    def settle(self, merged: Tensor, /) -> Tensor:
        payload = self.codec.unpack(merged, self.spec)
        return self.codec.settle(payload, self.spec, self.size).buffer


@dataclass(frozen=True)
class MeanOfCoded(Job):
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
        mean = mean_of_decoded(codec, self.spec, self.key, messages, self.members)
        if not self.squeezes:
            return mean, None
        if state is None:
            feeds_back = codec.guarantee(self.spec).contracts
            residual = torch.zeros_like(mean) if feeds_back else None
            state = {"codec": codec.init(self.spec), "residual": residual}
        payload, lost, inner = encode(
            codec, mean, state["residual"], state["codec"], self.owner_key
        )
        return payload.buffer, {"codec": inner, "residual": lost}


@dataclass(frozen=True)
class MeanOfHeard(Job):
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
        _zeros(spec, answer.device) if answer.dtype == torch.uint8 else checked_answer(answer, spec)
        for spec, answer in zip(specs, answers)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def checked_answer(answer: Tensor, spec: Spec) -> Tensor:
    """What an owner says a mean is, if it can be one of such tensors."""
    if Spec.of(answer) != spec:
        raise WireError(
            f"an answer of {tuple(answer.shape)} {answer.dtype}, expected {tuple(spec.shape)} "
            f"{spec.dtype}"
        )
    return answer


def _zeros(spec: Spec, device: torch.device) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def values(payload: Payload) -> Tensor:
    return payload.parts["values"]


def statistic(codec: Codec, x: Tensor, residual: Tensor | None) -> Tensor | None:
    if not codec.shares:
        return None
    total = corrected(x, residual)
    check_input(codec, total)
    return codec.statistic(total)


def decode(codec: Codec, spec: Spec, key: Key, buffer: Tensor) -> Tensor:
    return codec.decode(codec.unpack(buffer, spec), spec, key)


def decode_values(codec: Codec, spec: Spec, key: Key, values: Tensor) -> Tensor:
    assert codec.parts == ("values",), f"{codec!r} is LINEAR but has parts {codec.parts}"
    return codec.join({"values": values}, spec.flat(), key).reshape(spec.shape)


def mean_of_decoded(
    codec: Codec, spec: Spec, key: Key, buffers: tuple[Tensor, ...], senders: tuple[int, ...]
) -> Tensor:
    payloads = [codec.unpack(buffer, spec) for buffer in buffers]
    return codec.decode_mean(payloads, spec, [key.private(rank) for rank in senders])


def encode(
    codec: Codec,
    x: Tensor,
    residual: Tensor | None,
    state: State,
    key: Key,
    is_sent: bool = True,
) -> tuple[Payload, Tensor | None, State]:
    """The payload, what was lost if a residual is kept, and the new state.

    `is_sent`: the payload travels as it is, not just its values; its checksum is part of the work.
    """
    lost = None
    if residual is None:
        payload, state = codec.encode(x, state, key)
    else:
        payload, lost, state = codec.encode_feedback(x, residual.to(x.device), state, key)
    if is_sent:
        _ = payload.buffer
    return payload, lost, state


def encode_shards(codec: Codec, *shards: Sequence[Any]) -> list[tuple[Payload, Any, State]]:
    return [encode(codec, *shard) for shard in zip(*shards)]


def decode_own(
    codec: Codec, spec: Spec, specs: Sequence[Spec], keys: list[Key], payloads: list[Payload]
) -> Tensor:
    pieces = [codec.decode(*shard).reshape(-1) for shard in zip(payloads, specs, keys)]
    return torch.cat(pieces).reshape(spec.shape)


def decode_shards(
    codec: Codec | None,
    specs: tuple[Spec, ...],
    key: Key,
    buffers: tuple[Tensor, ...],
    senders: tuple[int, ...],
) -> Tensor:
    if codec is None:  # they are the shards themselves
        return torch.cat([checked_answer(*pair) for pair in zip(buffers, specs)])
    pieces = [
        decode(codec, spec, key.private(rank), buffer)
        for rank, spec, buffer in zip(senders, specs, buffers)
    ]
    return torch.cat(pieces)
