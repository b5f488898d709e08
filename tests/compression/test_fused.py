"""Fused codecs give the bytes of their own `split`, and the residual that decoding would give."""

import pytest
import torch

from gradwire.compression import COMPRESSION
from gradwire.core.chain import Chain
from gradwire.core.codec import Codec
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.fusion import _encode_feedback, decode_mean, encode_feedback
from gradwire.core.group import mean_in_order
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(seed=5, step=2).private(3).child("fc")
CODECS = pytest.mark.parametrize(
    "codec",
    [
        COMPRESSION.parse(text)
        for text in (
            "sign",
            "sign(bucket=64)",
            "sign(bucket=4096)",
            "qsgd(bits=4)",
            "qsgd(bits=8, bucket=64)",
            "qsgd(5, bucket=1000)",
            "topk(0.01)",
            "topk(0.3)",
            "sampledk(0.01)",
            "sampledk(0.3)",
            "aji(0.01)",
            "aji(0.3)",
            "gaussiank(0.01)",
            "gaussiank(0.3)",
            "sidco(0.01)",
            "sidco(0.3)",
            "stc(0.01)",
            "stc(1.0)",
            "sbc(0.01)",
            "sbc(0.6)",
            "dryden(0.01)",
            "dryden(1.0)",
            "threshold(0.5)",
            "threshold(100.0)",
            "topk(0.1) >> fp16",
            "aji(0.1) >> fp16",
            "fp16",
            "bf16",
            "randomk(0.1)",
        )
    ],
    ids=repr,
)
SHAPES = pytest.mark.parametrize("shape", [(0,), (1,), (9,), (3, 171), (100, 100)], ids=str)


def gaussian(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@CODECS
@SHAPES
def test_fused_bytes_are_those_of_split(codec, shape):
    x = gaussian(shape)
    payload, _ = codec.encode(x, None, KEY)
    expected, _ = Codec.encode(codec, x, None, KEY)
    assert torch.equal(payload.buffer, expected.buffer)
    assert tuple(payload.parts) == tuple(expected.parts)


@CODECS
@SHAPES
def test_fused_feedback_is_encode_and_decode(codec, shape):
    x, residual = gaussian(shape), gaussian(shape, 1)
    payload, lost, _ = encode_feedback(codec, x, residual, None, KEY)
    expected, expected_lost, _ = _encode_feedback(codec, x, residual, None, KEY)
    assert torch.equal(payload.buffer, expected.buffer)
    assert torch.equal(lost, expected_lost)


@CODECS
@SHAPES
def test_fused_decoding_is_that_of_join(codec, shape):
    payloads = [codec.encode(gaussian(shape, r), None, KEY.private(r))[0] for r in range(4)]
    spec, keys = Spec(shape, torch.float32), [KEY.private(r) for r in range(4)]
    decoded = [Codec.decode(codec, p, spec, key) for p, key in zip(payloads, keys)]
    assert torch.equal(codec.decode(payloads[1], spec, keys[1]), decoded[1])
    mean = decode_mean(codec, payloads, spec, keys)
    assert torch.equal(mean, mean_in_order(decoded, 4))


@CODECS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(codec, bad):
    x, zero = gaussian((10, 50)), torch.zeros(10, 50)
    x[7, 7] = bad
    with pytest.raises(NonFiniteError, match=r"\[10, 50\]"):
        codec.encode(x, None, KEY)
    flat = isinstance(codec, Chain)  # its stages see vectors
    with pytest.raises(NonFiniteError, match=r"\[500\]" if flat else r"\[10, 50\]"):
        encode_feedback(codec, x, zero, None, KEY)
    huge = torch.full((10, 50), 3e38)
    with pytest.raises(NonFiniteError):
        encode_feedback(codec, huge, huge, None, KEY)


def test_a_symbol_out_of_the_alphabet_is_refused():
    codec, x = COMPRESSION.parse("qsgd(bits=4)"), gaussian((100,))
    payload, _ = codec.encode(x, None, KEY)
    crafted = payload.replace(values=torch.full_like(payload.parts["values"], 0xF0))
    with pytest.raises(WireError, match="symbol 15"):
        codec.decode(crafted, Spec.of(x), KEY)
