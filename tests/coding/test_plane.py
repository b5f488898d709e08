"""A plane of bits: what it gains, what it costs, and what it refuses."""

import math

import pytest
import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding import plane
from gradwire.coding.plane import decode_plane, encode_plane
from gradwire.coding.polar.polarization_weight import scores
from gradwire.core.errors import WireError
from gradwire.core.key import Key

KEY = Key(seed=6).child("plane")
DIGEST = 0x9361B3A6  # of the orders that both ends have
SCALE = 4.0  # nats to a squared step


def uniform(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Squared distances of uniform numbers from even and odd ones, and the ratios."""
    x = 2 * KEY.uniform64(count) - 1
    even, odd = x.square(), (1 - x.abs()).square()
    return even, odd, (8 * SCALE * (odd - even)).round().clamp(-127, 127).to(torch.int8)


@pytest.mark.parametrize(("count", "least"), [(2048, 1.1), (20_000, 1.25), (1 << 17, 1.31)])
def test_it_gains_more_than_eight_states_do(count, least) -> None:
    """On a uniform source, over a scalar quantiser of the same rate: 1.09 dB for the trellis."""
    even, odd, ratios = uniform(count)
    packed, plane = encode_plane(ratios)
    q = kernels.unpack_uints(plane, 1, count).bool()
    error = float(torch.where(q, odd, even).mean())
    rate = 8 * packed.numel() / count
    assert 0.43 < rate < 0.46
    gain = 10 * math.log10(4 ** (1 - rate) / 12 / error)
    assert least < gain < 1.44  # what there is for two quantisers at this rate


@pytest.mark.parametrize("count", [1, 63, 65, 255, 257, 3000, 40_001, 70_000])
def test_the_receiver_has_the_plane(count) -> None:
    packed, plane = encode_plane(uniform(count)[2])
    assert plane.numel() == -(-count // 8)
    rest = torch.tensor([7, 7], dtype=torch.uint8)
    again, used = decode_plane(torch.cat([packed, rest]), count)
    assert used == packed.numel()
    assert torch.equal(again, plane)


def test_it_does_not_depend_on_the_backend(monkeypatch) -> None:
    ratios, found = uniform(1500)[2], []
    for backend in ("", "reference"):
        monkeypatch.setenv("GRADWIRE_KERNELS", backend)
        found.append(encode_plane(ratios))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_what_does_not_care_costs_nothing() -> None:
    """Also if it comes in a row, as in a matrix with rows that are all small."""
    count = 1 << 16
    even, odd, ratios = uniform(count)
    packed, _ = encode_plane(ratios)
    ratios[count // 8 : -count // 8] = 0
    cared = ratios != 0
    sparse, plane = encode_plane(ratios)
    assert sparse.numel() < 0.27 * packed.numel()
    q = kernels.unpack_uints(plane, 1, count).bool()
    error = float(torch.where(q, odd, even)[cared].mean())
    rate = 8 * sparse.numel() / int(cared.sum())
    assert 10 * math.log10(4 ** (1 - rate) / 12 / error) > 1.2


def test_bytes_that_are_no_plane() -> None:
    packed, _ = encode_plane(uniform(1000)[2])
    for forged in (packed[:0], packed[:1], packed[:-1], torch.zeros_like(packed), packed | 255):
        with pytest.raises(WireError, match="plane"):
            decode_plane(forged, 1000)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_code_is_the_same_whatever_the_default_dtype(dtype) -> None:
    """Both ends compute the order of the inputs; this is what it has to be."""
    caches = (plane._by_weight, plane._order, plane.plane_digest)
    before = torch.get_default_dtype()
    try:
        for kept in caches:
            kept.cache_clear()
        torch.set_default_dtype(dtype)
        assert plane.plane_digest() == DIGEST
        assert scores(256).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
        for kept in caches:
            kept.cache_clear()
    assert plane.plane_digest() == DIGEST


def test_weights_are_too_far_apart_to_change_places() -> None:
    for n in (1 << 8, 1 << 15):
        assert float(scores(n).sort().values.diff().min()) > 0.00008
