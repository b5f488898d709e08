"""Operations that write into given memory end in the bits of those that do not."""

import pytest
import torch
from torch import Tensor

from gradwire.compression import COMPRESSION
from gradwire.core.chain import Chain
from gradwire.core.codec import Algebra, Codec, Kind, spec_in_state, unpack
from gradwire.core.coded import agreed, decode, decode_shards, encode, encode_shards, statistic
from gradwire.core.fusion import decode_into, encode_feedback
from gradwire.core.key import Key
from gradwire.core.metering import DECODE, ENCODE_FEEDBACK, metered
from gradwire.core.notation import notation_name
from gradwire.core.spec import Spec
from sampling import cover

KEY = Key(seed=5, step=2).private(3).child("fc")
CHAINS = ("topk(0.3) >> qsgd(bits=4)", "topk(0.1) >> fp16", "topk(0.3) >> sign", "bf16 >> sign")
EXAMPLES = [
    (COMPRESSION.parse(text), cls)
    for cls in COMPRESSION
    for text in (cls.examples or (notation_name(cls),))
] + [(COMPRESSION.parse(text), text) for text in CHAINS]
REAL = [
    (codec, cls)
    for codec, cls in EXAMPLES
    if isinstance(codec, Codec) and codec.traits.takes is Kind.REAL
]
# Those that may be scattered.
OPAQUE = [
    (codec, cls)
    for codec, cls in REAL
    if codec.algebra is Algebra.OPAQUE and not codec.traits.layered
]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
NUMELS = (0, 1, 9, 777)  # as many as the least budget of the examples allows


def vector(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A third of it zeros, so that selections may run out of elements."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    x[: numel // 3] = 0.0
    return x.to(dtype)


def inner(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A vector of NaN, and the part of it that is to be written, at no round address."""
    whole = torch.full((numel + 4,), torch.nan, dtype=dtype)
    return whole, whole[3 : 3 + numel]


def untouched(whole: Tensor) -> bool:
    return bool(whole[:3].isnan().all() and whole[-1].isnan())


def ready(codec: Codec, x: Tensor, residual: Tensor | None) -> Codec:
    """The codec as all ranks agree on it."""
    shared = statistic(codec, x, residual)
    return codec if shared is None else agreed(codec, shared)


@DTYPES
@pytest.mark.parametrize("codec", cover(REAL), ids=repr)
def test_what_is_lost_is_the_same_in_given_memory(codec, dtype) -> None:
    for numel in NUMELS:
        x, residual = vector(numel, 1, dtype), vector(numel, 2, dtype)
        inputs = x.clone(), residual.clone()
        used, spec = ready(codec, x, residual), Spec.of(x)
        payload, lost, state = encode_feedback(used, x, residual, used.init(spec), KEY)
        whole, out = inner(numel, dtype)
        with metered() as reports:
            other, own, new = encode(used, x, residual, used.init(spec), KEY, out=out)
        assert own is out
        assert untouched(whole)
        assert torch.equal(other.buffer, payload.buffer)
        assert torch.equal(out, lost)
        assert repr(new) == repr(state)
        assert torch.equal(x, inputs[0])
        assert torch.equal(residual, inputs[1])
        if used._reports:  # else its members do
            assert [work.operation for work in reports if work.codec] == [ENCODE_FEEDBACK]


@DTYPES
@pytest.mark.parametrize("codec", cover(REAL), ids=repr)
def test_decoding_is_the_same_in_given_memory(codec, dtype) -> None:
    for numel in NUMELS:
        x = vector(numel, 1, dtype)
        used, spec = ready(codec, x, None), Spec.of(x)
        state = used.init(spec)
        payload, _ = used.encode(x, state, KEY)
        spec = spec_in_state(used, x, state)
        payload = unpack(used, payload.buffer, spec)
        sent = payload.buffer.clone()
        whole, out = inner(numel, dtype)
        with metered() as reports:
            decoded = decode_into(used, payload, spec, KEY, out)
        assert decoded is out
        assert untouched(whole)
        assert torch.equal(out, used.decode(payload, spec, KEY))
        assert torch.equal(payload.buffer, sent)
        if used._reports:
            assert [work[:3] for work in reports] == [(used, DECODE, numel)]


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("codec", cover(OPAQUE), ids=repr)
def test_shards_are_encoded_and_decoded_as_each_would_be(codec, count) -> None:
    for numel in (2, 47, 778):  # of two elements some shards are empty
        x, residual = vector(numel, 1), vector(numel, 2)
        used = ready(codec, x, residual)
        shards, kept = x.tensor_split(count), residual.tensor_split(count)
        specs, keys = tuple(map(Spec.of, shards)), [KEY] * count

        def states(used=used, specs=specs):
            return [used.init(spec) for spec in specs]

        single = [encode(used, *each) for each in zip(shards, kept, states(), keys, strict=True)]
        payloads, lost, new = encode_shards(used, shards, kept, states(), keys)
        assert [p.buffer.tolist() for p in payloads] == [p.buffer.tolist() for p, _, _ in single]
        assert torch.equal(lost, torch.cat([piece for _, piece, _ in single]))
        assert repr(new) == repr(tuple(state for _, _, state in single))
        none = [None] * count
        unfed, nothing, _ = encode_shards(used, shards, none, states(), keys)
        assert nothing is None
        assert [p.buffer.tolist() for p in unfed] == [
            encode(used, *each)[0].buffer.tolist()
            for each in zip(shards, none, states(), keys, strict=True)
        ]
        senders, buffers = (3,) * count, tuple(p.buffer for p in payloads)
        whole = decode_shards(used, specs, KEY, buffers, senders)
        pieces = [
            decode(used, spec, KEY.private(rank), buffer)
            for rank, spec, buffer in zip(senders, specs, buffers, strict=True)
        ]
        assert torch.equal(whole, torch.cat(pieces))


@pytest.mark.parametrize("text", ["topk(0.3) >> qsgd(bits=4)", "topk(0.3) >> sign"])
def test_members_of_a_chain_report_each_piece_of_work_once(text) -> None:
    codec, x = COMPRESSION.parse(text), vector(777, 1)
    assert isinstance(codec, Chain)
    payload, _ = codec.encode(x, None, KEY)
    with metered() as reports:
        decode_into(codec, payload, Spec.of(x), KEY, torch.empty(777))
    done = [work.codec for work in reports if work.codec is not None]
    assert sorted(map(repr, done)) == sorted(map(repr, codec.stages))
