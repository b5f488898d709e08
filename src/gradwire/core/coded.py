"""Functions on the payloads of several workers: encoding, decoding, averaging, merging."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.batched import batched
from gradwire.core.codec import (
    Codec,
    State,
    check_input,
    corrected,
    encode_values,
    finalize,
    merge,
    unpack,
)
from gradwire.core.coded_rows import EncodedRows, UnfedRows
from gradwire.core.decoded_rows import decode_known, mean_of_known
from gradwire.core.errors import WireError
from gradwire.core.fusion import (
    Residual,
    decode_into,
    decode_mean,
    encode_feedback,
    moved_into,
)
from gradwire.core.group import Aggregation, Merging, concatenate, mean_in_order
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

NO_NEWS = 0  # the one byte of a worker that sends no payload; every payload is longer


@dataclass(frozen=True)
class MergeOfCoded(Merging):
    """Merges two packed payloads of one codec and tensor."""

    codec: Codec
    spec: Spec
    size: int

    def merge(self, a: Tensor, b: Tensor, /) -> Tensor:
        first, second = (unpack(self.codec, buffer, self.spec) for buffer in (a, b))
        return merge(self.codec, first, second).buffer

    def finalize(self, merged: Tensor, /) -> Tensor:
        payload = unpack(self.codec, merged, self.spec)
        return finalize(self.codec, payload, self.spec, self.size).buffer


@dataclass(frozen=True)
class MeanOfCoded(Aggregation):
    """The owner of a shard averages the payloads, and reencodes the mean.

    It feeds its own error back, unless that error need not die out: the feedback of an unbiased
    codec of large variance grows without bound. Without `reencodes` it answers with the mean.
    """

    codec: Codec
    spec: Spec
    key: Key  # of the members, for this shard
    members: tuple[int, ...]
    owner_key: Key
    reencodes: bool

    def run(self, messages: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        codec = self.codec
        mean = mean_of_decoded(codec, self.spec, self.key, messages, self.members)
        if not self.reencodes:
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
class MeanOfReceived(Aggregation):
    """The mean of payloads; workers without news send one byte and count as zero."""

    codec: Codec
    spec: Spec
    key: Key
    members: tuple[int, ...]

    def run(self, messages: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        codec, spec, decoded = self.codec, self.spec, []
        for rank, message in zip(self.members, messages):
            if message.numel() != 1:
                payload = unpack(codec, message, spec)
                decoded.append(codec.decode(payload, spec, self.key.private(rank)))
            elif int(message[0]) != NO_NEWS:
                raise WireError(f"rank {rank} sent the byte {int(message[0])}, expected {NO_NEWS}")
        if not decoded:  # the answer is one byte, too
            return messages[0], None
        return mean_in_order(decoded, len(messages)), None


def mean_of_received(job: MeanOfReceived, messages: tuple[Tensor, ...]) -> Tensor:
    return job.run(messages, None)[0]


def join_answers(specs: tuple[Spec, ...], answers: tuple[Tensor, ...]) -> Tensor:
    """The whole of what the owners of shards answered; one byte if no worker had news."""
    pieces = [
        zeros(spec, answer.device) if answer.dtype == torch.uint8 else checked_answer(answer, spec)
        for spec, answer in zip(specs, answers)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def checked_answer(answer: Tensor, spec: Spec) -> Tensor:
    """The answer of an owner, if it can be the mean of tensors of `spec`."""
    if Spec.of(answer) != spec:
        raise WireError(
            f"an answer of {tuple(answer.shape)} {answer.dtype}, expected {tuple(spec.shape)} "
            f"{spec.dtype}"
        )
    return answer


def zeros(spec: Spec, device: torch.device) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def values(payload: Payload) -> Tensor:
    return payload.parts["values"]


def statistic(codec: Codec, x: Tensor, residual: Residual | None) -> Tensor | None:
    """The vector whose maximum over all ranks is needed before encoding; None: none."""
    shared = codec.traits.statistic
    if shared is None:
        return None
    assert not isinstance(residual, kernels.Motion), f"{codec!r} takes no motion"
    total = corrected(x, residual)
    check_input(codec, total)
    return shared.of(total)


def agreed(codec: Codec, maximum: Tensor) -> Codec:
    """The codec that knows the maximum of all ranks' `statistic`."""
    shared = codec.traits.statistic
    assert shared is not None
    return shared.agree(maximum)


def decode(codec: Codec, spec: Spec, key: Key, buffer: Tensor) -> Tensor:
    return codec.decode(unpack(codec, buffer, spec), spec, key)


def decode_shared(codec: Codec, spec: Spec, key: Key, buffer: Tensor) -> Tensor:
    """`decode`, for a result that several read, and nobody changes."""
    known = decode_known(codec, spec, buffer)
    return decode(codec, spec, key, buffer) if known is None else known


def decode_values(codec: Codec, spec: Spec, key: Key, values: Tensor) -> Tensor:
    assert codec.parts == ("values",), f"{codec!r} is LINEAR but has parts {codec.parts}"
    return codec.join({"values": values}, spec.flat(), key).reshape(spec.shape)


def mean_of_decoded(
    codec: Codec, spec: Spec, key: Key, buffers: tuple[Tensor, ...], senders: tuple[int, ...]
) -> Tensor:
    mean = mean_of_known(codec, spec, buffers)
    if mean is not None:
        return mean
    payloads = [unpack(codec, buffer, spec) for buffer in buffers]
    return decode_mean(codec, payloads, spec, [key.private(rank) for rank in senders])


@batched(EncodedRows())
def encode(
    codec: Codec,
    x: Tensor,
    residual: Residual | None,
    state: State,
    key: Key,
    is_sent: bool = True,
    out: Tensor | None = None,
) -> tuple[Payload, Tensor | None, State]:
    """The payload, what was lost if a residual is kept (in `out`, if given), and the new state.

    `is_sent`: the payload travels as it is, not just its values; its checksum is part of the work.
    """
    lost = None
    if residual is None:
        make = codec.encode if is_sent else partial(encode_values, codec)
        payload, state = make(x, state, key)
    else:
        if isinstance(residual, kernels.Motion):
            residual = residual.on(x.device)
        else:
            residual = residual.to(x.device)
        payload, lost, state = encode_feedback(codec, x, residual, state, key, out)
        if out is not None:
            lost = moved_into(out, lost)
    if is_sent:
        _ = payload.buffer
    return payload, lost, state


@batched(UnfedRows())
def encode_unfed(codec: Codec, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
    """The payload of x and the new state, given that of `Lifted(codec)`."""
    payload, inner = codec.encode(x, state["codec"], key)
    return payload, {**state, "codec": inner}


def shards_of(residual: Residual | None, count: int) -> Sequence[Residual | None]:
    """A residual cut as the vector that it is added to."""
    if residual is None:
        return [None] * count
    if isinstance(residual, kernels.Motion):
        return residual.shards(count)
    return residual.reshape(-1).tensor_split(count)


def encode_shards(
    codec: Codec,
    shards: Sequence[Tensor],
    residuals: Sequence[Residual | None],
    states: Sequence[State],
    keys: Sequence[Key],
) -> tuple[list[Payload], Tensor | None, tuple[State, ...]]:
    """Payloads and new states of all shards, and what was lost of all of them as one vector."""
    lost = None
    pieces: Sequence[Tensor | None] = [None] * len(shards)
    if residuals[0] is not None:
        first = shards[0]
        lost = kernels.empty(sum(shard.numel() for shard in shards), first.dtype, first.device)
        pieces = lost.split([shard.numel() for shard in shards])
    payloads, new = [], []
    for shard, residual, state, key, piece in zip(shards, residuals, states, keys, pieces):
        payload, _, state = encode(codec, shard, residual, state, key, out=piece)
        payloads.append(payload)
        new.append(state)
    return payloads, lost, tuple(new)


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
        return concatenate([checked_answer(*pair) for pair in zip(buffers, specs)])
    first = specs[0]
    whole = kernels.empty(sum(spec.numel for spec in specs), first.dtype, buffers[0].device)
    pieces = whole.split([spec.numel for spec in specs])
    for rank, spec, buffer, piece in zip(senders, specs, buffers, pieces):
        decode_into(codec, unpack(codec, buffer, spec), spec, key.private(rank), piece)
    return whole
