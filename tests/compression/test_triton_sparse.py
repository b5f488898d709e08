"""Sparse codecs on interpreted Triton kernels give the bytes and vectors of the reference."""

import pytest
import torch

from gradwire import kernels
from gradwire.compression import COMPRESSION
from gradwire.core.errors import NonFiniteError
from gradwire.core.fusion import decode_into, encode_feedback
from gradwire.core.key import Key
from gradwire.core.spec import Spec

pytest.importorskip("triton", reason="Triton is not installed")

KEY = Key(seed=5, step=2).private(3).child("fc")
CODECS = [
    "topk(0.01)",
    "topk(0.4)",
    "topk(0.05) >> fp16",
    "topk(0.05) >> qsgd(bits=4)",
    "sampledk(0.02)",
    "sampledk(0.3)",
    "randomk(0.1, unbiased=True, shared=False, indices=True)",
    "threshold(1.0)",
    "stc(0.02)",
    "wangni(0.1)",
    *(
        pytest.param(text, marks=pytest.mark.slow)
        for text in (
            "topk(1.0)",
            "randomk(0.1)",
            "aji(0.02)",
            "gaussiank(0.02)",
            "sidco(0.02)",
            "sbc(0.02)",
            "dryden(0.02)",
        )
    ),
]


def gaussian(numel, seed):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    x[::3] = (4 * x[::3]).round() / 4  # equal magnitudes
    return x


@pytest.fixture
def all_kernels(monkeypatch):
    """One program selects from so few elements that vectors take all kernels."""
    from gradwire.kernels.triton import _stages

    monkeypatch.setattr(_stages, "FEW", 1 << 10)


def bits(x):
    return x.contiguous().view(torch.uint8 if x.dtype == torch.uint8 else torch.int32)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("text", CODECS)
def test_payload_residual_and_decoded(monkeypatch, text):
    codec, numel = COMPRESSION.parse(text), 9001
    results = []
    for backend in ("triton", "reference"):
        monkeypatch.setenv("GRADWIRE_KERNELS", backend)
        x, residual = gaussian(numel, 0), gaussian(numel, 1)
        payload, lost, _ = encode_feedback(codec, x, residual, codec.init(Spec.of(x)), KEY)
        alone, _ = codec.encode(x, codec.init(Spec.of(x)), KEY)
        decoded = codec.decode(payload, Spec.of(x), KEY)
        into = decode_into(codec, payload, Spec.of(x), KEY, torch.full((numel,), torch.nan))
        results.append([payload.buffer, lost, alone.buffer, decoded, into])
    for number, (found, expected) in enumerate(zip(*results)):
        assert torch.equal(bits(found), bits(expected)), number


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("text", ["topk(0.02)", "sampledk(0.05)", "topk(0.1) >> qsgd(bits=4)"])
@pytest.mark.parametrize(
    "rule", [(0.9, 1.0, False, True), (0.9, 0.37, True, True), (0.5, 1.0, False, False)], ids=str
)
def test_velocity(monkeypatch, text, rule):
    codec, numel = COMPRESSION.parse(text), 5001
    results = []
    for backend in ("triton", "reference"):
        monkeypatch.setenv("GRADWIRE_KERNELS", backend)
        x, moved = gaussian(numel, 0), torch.full((numel,), torch.nan)
        motion = kernels.Motion(gaussian(numel, 1), gaussian(numel, 2), moved, *rule)
        payload, lost, _ = encode_feedback(codec, x, motion, codec.init(Spec.of(x)), KEY)
        results.append([payload.buffer, lost, moved])
    for found, expected in zip(*results):
        assert torch.equal(bits(found), bits(expected))


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("text", ["topk(0.01)", "sampledk(0.3)"])
def test_what_is_not_finite_is_refused(monkeypatch, text, bad):
    monkeypatch.setenv("GRADWIRE_KERNELS", "triton")
    codec, x = COMPRESSION.parse(text), gaussian(3000, 0)
    x[777] = bad
    with pytest.raises(NonFiniteError):
        codec.encode(x, codec.init(Spec.of(x)), KEY)
