"""Quantisers that pack in a kernel: the same bytes and numbers whichever backend runs."""

import pytest
import torch

from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.compression.quantization._packed import look_up
from gradwire.core.codec import Codec
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(seed=5, step=2).private(3).child("fc")
CODECS = pytest.mark.parametrize(
    "codec",
    [
        COMPRESSION.parse(text)
        for text in (
            "eden(2)",
            "eden(4, unbiased=False, block=128)",
            "srq(1, block=64)",
            "srq(4)",
            "nuq(bits=4)",
            "nuq(40, ratio=0.9, bucket=100)",
            "adaptive(4)",
            "adaptive(8, bucket=64)",
            "natural",
            'natural_dithering(4, norm="l2")',
            "terngrad",
            "terngrad(0.0, bucket=64)",
            "terngrad(scale=1.5)",
            "lowprec(8)",
            'lowprec(2, block=7, rounding="nearest")',
            "fp8",
            'fp8("e5m2", block=16)',
            "threelc(1.5)",
            "onebit(100)",
        )
    ],
    ids=repr,
)


def gaussian(count: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    x[::50] = 0.0
    return x


@CODECS
@pytest.mark.parametrize("count", [0, 1, 9, 513, 40_001])
def test_backends_agree(codec, count, monkeypatch):
    if kernels.backend() != "native":
        pytest.skip("needs the native kernels")
    x, spec = gaussian(count), Spec((count,), torch.float32)
    payload, _ = codec.encode(x, codec.init(spec), KEY)
    decoded = codec.decode(payload, spec, KEY)
    monkeypatch.setenv("GRADWIRE_KERNELS", "reference")
    expected, _ = codec.encode(x, codec.init(spec), KEY)
    assert torch.equal(payload.buffer, expected.buffer)
    assert torch.equal(decoded, codec.decode(payload, spec, KEY))


@CODECS
def test_split_and_join_are_the_same_unpacked(codec):
    x = gaussian(700)
    payload, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
    unpacked, _ = Codec.encode(codec, x, codec.init(Spec.of(x)), KEY)
    assert torch.equal(payload.buffer, unpacked.buffer)
    decoded = codec.decode(payload, Spec.of(x), KEY)
    assert torch.equal(decoded, Codec.decode(codec, payload, Spec.of(x), KEY))


@CODECS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(codec, bad):
    x = gaussian(500).reshape(10, 50)
    x[7, 7] = bad
    with pytest.raises(NonFiniteError, match=r"\[10, 50\]"):
        codec.encode(x, codec.init(Spec.of(x)), KEY)


def test_a_symbol_without_a_number_is_refused():
    packed = torch.full((4,), 0xFF, dtype=torch.uint8)
    with pytest.raises(WireError, match="symbol 15"):
        look_up(packed, torch.zeros(15), None, 8, 8)
    with pytest.raises(WireError, match="no finite number"):
        look_up(packed, torch.full((256,), torch.inf), None, 4, 4)
