"""torch's default device and dtype are for models: what codecs compute does not depend on them."""

import pytest
import torch

from gradwire.coding.polar import PolarCompressor
from gradwire.coding.polar.compressor import _code
from gradwire.coding.polar.construction import CONSTRUCTIONS, _free_positions
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(seed=7).private(0)


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("numel", [1, 40, 2500])
@pytest.mark.parametrize(
    "method",
    [
        "dq(0.5)",
        "dq(2.0)",
        "dq(step=0.5)",
        "sign",
        "sign >> polar(0.5, block=256)",
        "polar(0.5, block=256)",
        "polar(2.0, block=64)",
        "polar(0.3, block=256, rotate=True)",
        "topk(0.3) >> polar(2.0, block=64)",
    ],
)
def test_the_default_device_does_not_matter(method, numel, backend, monkeypatch) -> None:
    if backend and numel > 40:
        pytest.skip("the reference is slow")
    monkeypatch.setenv("GRADWIRE_KERNELS", backend)
    monkeypatch.setenv("GRADWIRE_CACHE", "")
    x, codec = KEY.normal(numel), COMPRESSION.parse(method)
    spec, buffers = Spec.of(x), []
    for device in ("meta", "cpu"):
        with torch.device(device):
            state = codec.init(spec)
            for _ in range(2):
                payload, state = codec.encode(x, state, KEY)
                buffers.append(payload.buffer)
            buffers.append(codec.decode(payload, spec, KEY))
    assert all(buffer.device.type == "cpu" for buffer in buffers)
    assert all(torch.equal(a, b) for a, b in zip(buffers[:3], buffers[3:]))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"frozen": 3},
        {"list_size": 8},
        {"list_size": 3},
        {"f": "exact"},
        {"decision": "randomized"},
        *({"construction": name} for name in CONSTRUCTIONS),
    ],
    ids=str,
)
def test_nor_for_the_compressor_of_bits(options, monkeypatch) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", "")
    bits, packed = (KEY.words(3 * 128) < 0).view(3, 128), []
    for device, dtype in (("meta", torch.bfloat16), ("cpu", torch.float32)):
        _code.cache_clear()
        _free_positions.cache_clear()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                compressor = PolarCompressor(128, 50, **options)
                packed.append(compressor.compress(bits))
                assert compressor.decompress(packed[-1]).device.type == "cpu"
        finally:
            torch.set_default_dtype(before)
    assert torch.equal(*packed)
