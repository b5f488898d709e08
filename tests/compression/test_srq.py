"""Suresh et al. 2017: random rounding of a rotated vector."""

import math

import pytest
import torch

from gradwire.compression.quantization._rotation import rotate
from gradwire.compression.quantization.qsgd import QSGD
from gradwire.compression.quantization.srq import SRQ
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decoded(codec, x: torch.Tensor, key: Key = Key(0)) -> torch.Tensor:  # noqa: B008
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def relative_error(found: torch.Tensor, x: torch.Tensor) -> float:
    return float((found - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("numel", [64, 100, 300])
def test_rotated_outputs_are_levels_next_to_the_rotated_inputs(bits, numel) -> None:
    x, key, codec = Key(1).normal(numel).double(), Key(2), SRQ(bits, block=64)
    payload, _ = codec.encode(x, None, key)
    found = rotate(codec.decode(payload, Spec.of(x), key), key, 64)
    y = rotate(x, key, 64)
    for i, (before, after) in enumerate(zip(y.split(64), found.split(64))):
        low, high = before.min(), before.max()
        assert payload.parts["low"][i] == low
        assert payload.parts["high"][i] == high
        step = (high - low) / (2**bits - 1)
        level = (after - low) / step
        assert torch.allclose(level, level.round(), rtol=0, atol=1e-9)
        assert ((after - before).abs() <= step * (1 + 1e-9)).all()


@pytest.mark.few
@pytest.mark.parametrize("bits", [1, 3])
def test_it_is_unbiased_with_the_variance_of_random_rounding(bits) -> None:
    x, num_keys = Key(3).normal(256).double(), 500
    codec = SRQ(bits, block=256)
    found, expected = [], []
    for i in range(num_keys):
        key = Key(4).at(i)
        found.append(decoded(codec, x, key))
        y = rotate(x, key, 256)
        step = (y.max() - y.min()) / (2**bits - 1)
        fraction = ((y - y.min()) / step) % 1
        expected.append(float(step**2 * (fraction * (1 - fraction)).sum()))
    all_found, variance = torch.stack(found), sum(expected) / num_keys
    total = float((all_found - x).square().sum(dim=1).mean())
    assert total == pytest.approx(variance, rel=0.05)
    bias = float((all_found.mean(dim=0) - x).square().sum())
    assert bias == pytest.approx(variance / num_keys, rel=0.5)
    assert variance <= codec.guarantee(Spec.of(x)).omega * float(x.square().sum())


@pytest.mark.parametrize(
    ("codec", "numel", "omega"),
    [
        (SRQ(1), 10**6, 2 * math.log(4096) + 2),
        (SRQ(4), 10**6, (2 * math.log(4096) + 2) / 15**2),
        (SRQ(2, block=64), 10**6, (2 * math.log(64) + 2) / 9),
        (SRQ(2), 100, (2 * math.log(64) + 2) / 9),  # a short vector has rows of 64
        (SRQ(2), 3, 1 / 9),  # without the rotation's help: n / 2
    ],
)
def test_the_variance_bound_is_theorem_3(codec, numel, omega) -> None:
    assert codec.guarantee(Spec((numel,), torch.float32)).omega == pytest.approx(omega)


def test_rotation_wins_where_one_element_is_large() -> None:
    # Without it, one outlier sets the step for all.
    x = Key(5).normal(4096)
    x[7] = 1000.0
    assert relative_error(decoded(SRQ(2), x), x) < 0.5
    x[::64] += 30.0
    plain = relative_error(decoded(QSGD(1, bucket=4096), x), x)
    assert relative_error(decoded(SRQ(2), x), x) < plain / 2


def test_rounding_is_private_and_rotation_shared() -> None:
    x, codec = Key(6).normal(100), SRQ(2)
    first, _ = codec.encode(x, None, Key(1).private(0))
    second, _ = codec.encode(x, None, Key(1).private(1))
    assert torch.equal(first.parts["low"], second.parts["low"])
    assert not torch.equal(first.parts["values"], second.parts["values"])


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_wire_carries_the_bits_and_two_floats_per_block(bits) -> None:
    numel = 50_000
    payload, _ = SRQ(bits).encode(Key(7).normal(numel), None, Key(0))
    assert payload.parts["values"].numel() == bits * numel // 8
    assert payload.parts["low"].numel() == payload.parts["high"].numel() == 13
    assert 8 * payload.nbytes / numel <= bits + 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_largest_elements_never_decode_to_infinity(dtype) -> None:
    x = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)
    assert torch.isfinite(decoded(SRQ(2), x)).all()


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (float("nan"), 1.0),
        (0.0, float("nan")),
        (-float("inf"), 0.0),
        (0.0, float("inf")),
        (1.0, 0.0),
    ],
)
def test_extremes_that_are_none_are_refused(low, high) -> None:
    payload, _ = SRQ(2).encode(torch.ones(8), None, Key(0))
    crafted = payload.replace(low=torch.tensor([low]), high=torch.tensor([high]))
    with pytest.raises(WireError, match="low, high"):
        SRQ(2).decode(crafted, Spec((8,), torch.float32), Key(0))


@pytest.mark.parametrize("make", [lambda: SRQ(0), lambda: SRQ(17), lambda: SRQ(2, block=48)])
def test_parameters_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="srq"):
        make()


def test_extremes_as_large_as_numbers_go_decode_to_finite_ones() -> None:
    payload, _ = SRQ(2).encode(torch.ones(8), None, Key(0))
    crafted = payload.replace(low=torch.tensor([-3e38]), high=torch.tensor([3e38]))
    assert torch.isfinite(SRQ(2).decode(crafted, Spec((8,), torch.float32), Key(0))).all()
