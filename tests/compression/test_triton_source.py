"""Source coding with interpreted Triton kernels: the payloads and vectors of the reference."""

import pytest
import torch

from gradwire.compression import COMPRESSION
from gradwire.core.codec import unpack
from gradwire.core.errors import NonFiniteError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

pytest.importorskip("triton", reason="Triton is not installed")

_KEY = Key(3)


def _coded(codec, x, backend, monkeypatch):
    """The bytes of two encodings in a row, and the vector in the second."""
    monkeypatch.setenv("GRADWIRE_KERNELS", backend)
    spec, state, payloads = Spec.of(x), codec.init(Spec.of(x)), []
    for step in range(2):
        payload, state = codec.encode(x, state, _KEY.at(step))
        payloads.append(payload.buffer.clone())
    received = unpack(codec, payloads[-1], spec)
    return payloads, codec.decode(received, spec, _KEY.at(1))


@pytest.mark.parametrize(
    ("notation", "numel"),
    [
        ("drive", 300),
        ("drive", 5),
        ("drive(block=64)", 1000),
        ("drive(unbiased=False)", 4096),
        ("eden(2)", 300),
        ("polar(0.5, block=64)", 300),
        ("polar(0.5, block=64)", 7),
        ("polar(0.7, block=64)", 64),
        ("polar(0.3, block=64, rotate=True)", 100),
        ("sign >> polar(0.5, block=64)", 100),
        ("dq(1.0)", 200),
        ("qsgd(4) >> rans", 300),
        ("qsgd(4) >> huffman", 300),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_payloads_and_vectors_are_those_of_the_reference(notation, numel, dtype, monkeypatch):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    codec = COMPRESSION.parse(notation)
    payloads, decoded = _coded(codec, x, "reference", monkeypatch)
    own_payloads, own_decoded = _coded(codec, x, "triton", monkeypatch)
    for own, expected in zip(own_payloads, payloads):
        assert torch.equal(own, expected)
    assert own_decoded.dtype == decoded.dtype
    assert torch.equal(own_decoded, decoded)


@pytest.mark.parametrize("factor", [1e-40, 2.0**-100, 2.0**100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drive_brings_what_it_cannot_square_into_range(factor, dtype, monkeypatch):
    x = (torch.randn(3000, generator=torch.Generator().manual_seed(2)) * factor).to(dtype)
    codec = COMPRESSION.parse("drive(block=1024)")
    payloads, decoded = _coded(codec, x, "reference", monkeypatch)
    own_payloads, own_decoded = _coded(codec, x, "triton", monkeypatch)
    assert all(map(torch.equal, own_payloads, payloads))
    assert torch.equal(own_decoded, decoded)


@pytest.mark.parametrize("notation", ["drive", "drive(unbiased=False)", "polar(0.5, block=64)"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("place", [0, 2999])
def test_what_is_not_finite_is_refused(notation, bad, place, monkeypatch):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    x = torch.ones(3000)
    x[place] = bad
    codec = COMPRESSION.parse(notation)
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        codec.encode(x, codec.init(Spec.of(x)), _KEY)
