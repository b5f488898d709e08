"""Whole codecs with interpreted Triton kernels give the bytes of the reference."""

import pytest
import torch

from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec, unpack
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.fusion import decode_into, decode_mean, encode_feedback
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

pytest.importorskip("triton", reason="Triton is not installed")

KEY = Key(seed=11, step=3).private(1).child("fc1.weight")
DENSE = [
    "sign",
    "sign(bucket=64)",
    "sign(bucket=264)",
    "qsgd(bits=4)",
    "qsgd(bits=8, bucket=1000)",
    "qsgd(5, bucket=64)",
    "qsgd(1)",
    "fp16",
    "bf16",
    "fp8",
    'fp8("e5m2", block=16)',
    "terngrad",
    "terngrad(0.0, bucket=64)",
    "natural",
    "natural_dithering(7)",
    'natural_dithering(4, norm="l2")',
    "nuq(bits=4)",
    "lowprec(4, block=16)",
    "lowprec(8)",
    "onebit(64)",
    "adaptive(4)",
    "srq(2)",
    "threelc",
    "signvote",
    "qsgd(bits=4) >> elias",
]


def everything(text: str, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Payloads, what they decode to, a residual and a mean."""
    codec = COMPRESSION.parse(text)
    assert isinstance(codec, Codec)
    generator = torch.Generator().manual_seed(numel)
    x, residual = (torch.randn(numel, generator=generator).to(dtype) for _ in range(2))
    spec = Spec.of(x)
    payload, _ = codec.encode(x, codec.init(spec), KEY)
    fed, lost, _ = encode_feedback(codec, x, residual, codec.init(spec), KEY)
    received = [unpack(codec, each.buffer.clone(), spec) for each in (payload, fed)]
    decoded = [codec.decode(each, spec, KEY) for each in (payload, *received)]
    mean = decode_mean(codec, [payload, *received], spec, [KEY] * 3)
    return [payload.buffer, fed.buffer, lost, *decoded, mean]


def bits(x: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(integer)


@pytest.mark.parametrize("text", DENSE)
def test_interpreted_kernels_give_the_bytes_of_the_reference(text, monkeypatch):
    cases = [(0, torch.float32), (1001, torch.float32), (70, torch.float64)]
    for case in cases:
        monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
        found = everything(text, *case)
        monkeypatch.setenv("GRADWIRE_KERNELS", "reference")
        for pair in zip(found, everything(text, *case)):
            assert torch.equal(*map(bits, pair)), case


@pytest.mark.parametrize("text", ["sign", "sign(bucket=64)", "qsgd(bits=4)", "fp16", "terngrad"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(text, bad, monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    codec, x = COMPRESSION.parse(text), torch.ones(300)
    x[7] = bad
    assert isinstance(codec, Codec)
    with pytest.raises(NonFiniteError, match=r"shape \[300\]"):
        codec.encode(x, codec.init(Spec.of(x)), KEY)


def test_kernels_of_accelerators_leave_nan_for_what_is_not_finite(monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    for dtype, largest in ((torch.float16, 65504.0), (torch.bfloat16, 3.3895313892515355e38)):
        x = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 65519.0, 3.4e38, -3.4e38, 1e-8])
        out = torch.empty(8, dtype=dtype)
        assert kernels.narrow(x, out) is None
        expected = x.clamp(-largest, largest).to(dtype)
        expected[1:4] = torch.nan
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(), expected.nan_to_num())
    assert kernels.from_table(out.view(torch.uint8)[:1], (256, 8, 0), torch.full((256,), torch.nan),
                              None, None, 8, 1)[1] is False  # fmt: skip


@pytest.mark.parametrize("text", ["sign", "sign(bucket=64)"])
def test_signs_of_own_payloads_are_read_where_they_lie(text, monkeypatch):
    """As on an accelerator, where nothing is checked of what our own kernels have written."""
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0))
    codec = COMPRESSION.parse(text)
    assert isinstance(codec, Codec)
    spec = Spec.of(x)
    expected = codec.decode(codec.encode(x, None, KEY)[0], spec, KEY)
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    payloads = []
    for _ in range(3):
        payload, _ = codec.encode(x, None, KEY)
        payload.is_own = True
        payloads.append(payload)
    decoded = codec.decode(payloads[0], spec, KEY)
    out = torch.full_like(x, torch.nan)
    assert torch.equal(decode_into(codec, payloads[0], spec, KEY, out), expected)
    assert torch.equal(decoded, expected)
    assert torch.equal(codec.decode(payloads[0], Spec((7, 143), x.dtype), KEY).view(-1), expected)
    mean = decode_mean(codec, payloads, spec, [KEY] * 3)
    assert torch.equal(mean, (expected + expected + expected) / 3)
    with pytest.raises(WireError, match="belongs to another tensor"):
        codec.decode(payloads[0], Spec((993,), x.dtype), KEY)


@pytest.mark.parametrize("text", ["natural", "terngrad", "terngrad(scale=1.5)", "fp8"])
def test_packed_symbols_of_accelerators_are_checked_later(text, monkeypatch):
    """As there: nobody waits to see whether all is finite, nor whether own symbols are good."""
    generator = torch.Generator().manual_seed(0)
    x, codec = torch.randn(1001, generator=generator), COMPRESSION.parse(text)
    assert isinstance(codec, Codec)
    spec = Spec.of(x)
    plain, _ = codec.encode(x, None, KEY)
    expected = codec.decode(plain, spec, KEY)
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    monkeypatch.setattr(kernels, "checks_there", lambda device: True)
    asked = []
    look_up = kernels.from_table

    def from_table(*given):
        asked.append(given[-1])
        return look_up(*given)

    monkeypatch.setattr(kernels, "from_table", from_table)
    payload, _ = codec.encode(x, None, KEY)
    assert payload.is_own
    assert torch.equal(codec.decode(payload, spec, KEY), expected)
    # Of another codec or tensor: its symbols are looked at.
    other = {name: part.clone() for name, part in payload.parts.items()}
    fresh = Payload(payload.buffer, other, payload.context + 1, is_own=True)
    assert torch.equal(codec.decode(fresh, spec, KEY), expected)
    assert asked == [False, True]
    assert torch.equal(unpack(codec, payload.buffer, spec).buffer, plain.buffer)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[500] = bad
        with pytest.raises(NonFiniteError, match=r"shape \[1001\]"):
            codec.encode(x, None, KEY)
