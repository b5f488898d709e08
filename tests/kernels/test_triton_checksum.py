"""Checksums of memory of which a lane takes many words, with few lanes, which are interpreted."""

import zlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

TURN = 32 * 2 * 4  # bytes that all lanes of all tiles take at once


@pytest.mark.parametrize("numel", [TURN - 3, TURN + 1, 2 * TURN, 5 * TURN + 70, 9 * TURN + 2])
@pytest.mark.parametrize("start", [0, 9, 200])
def test_many_words_of_a_lane(numel, start, monkeypatch):
    from gradwire.kernels.triton import checksum

    monkeypatch.setattr(checksum, "_LANES", 32)
    monkeypatch.setattr(checksum, "_TILES", 2)
    x = torch.randint(
        256, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(numel)
    )
    expected = zlib.crc32(x.numpy()[start:], 0x12345678), x[:40].numpy().tobytes()
    assert checksum.crc32(x, start, 0x12345678, 40) == expected
