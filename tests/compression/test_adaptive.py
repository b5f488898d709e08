"""Faghri et al. 2020: levels fitted to what they round."""

import pytest
import torch

from gradwire.compression.quantization.adaptive import Adaptive, fitted_levels
from gradwire.compression.quantization.qsgd import QSGD
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from sampling import slow


def decoded(codec, x: torch.Tensor, key: Key = Key(0)) -> torch.Tensor:  # noqa: B008
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def relative_error(codec, x: torch.Tensor) -> float:
    return float((decoded(codec, x) - x).square().sum() / x.square().sum())


def laplacian(numel: int) -> torch.Tensor:
    u = Key(1).uniform(numel) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def student(numel: int) -> torch.Tensor:
    """Three degrees of freedom."""
    return Key(2).normal(numel) / Key(3).normal(3 * numel).reshape(3, -1).square().mean(0).sqrt()


def cost(r: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor | None = None) -> float:
    """Variance of random rounding."""
    levels = torch.cat([r.new_zeros(1), inner, r.new_ones(1)])
    high = torch.searchsorted(levels, r).clamp(1, len(levels) - 1)
    variance = (r - levels[high - 1]) * (levels[high] - r)
    return float((variance if weight is None else variance * weight).sum())


def even(num_levels: int) -> torch.Tensor:
    return torch.arange(1, num_levels, dtype=torch.float64) / num_levels


@pytest.mark.parametrize("num_levels", [3, 7, 31])
@pytest.mark.parametrize("power", [1, 3])
def test_levels_are_stationary(num_levels, power) -> None:
    r = Key(4).uniform(20_000).double() ** power
    weight = Key(5).uniform(20_000).double()
    inner = fitted_levels(r, weight, num_levels)
    levels = torch.cat([r.new_zeros(1), inner, r.new_ones(1)])
    assert (levels[1:] > levels[:-1]).all()
    for a, level, c in zip(levels, levels[1:], levels[2:]):
        below = float((weight * (r - a))[(r > a) & (r < level)].sum())
        above = float((weight * (c - r))[(r > level) & (r < c)].sum())
        assert below == pytest.approx(above, rel=0.15)


@pytest.mark.parametrize("num_levels", [3, 7])
def test_no_single_level_can_be_moved_to_advantage(num_levels) -> None:
    r = Key(6).uniform(3000).double() ** 2
    inner = fitted_levels(r, torch.ones_like(r), num_levels)
    least = cost(r, inner)
    for j in range(num_levels - 1):
        for factor in (0.9, 0.97, 1.03, 1.1):
            moved = inner.clone()
            moved[j] *= factor
            assert cost(r, moved.sort().values) > least * 0.999


def test_uniform_magnitudes_get_even_levels() -> None:
    r = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    inner = fitted_levels(r, torch.ones_like(r), 7)
    assert torch.allclose(inner, even(7), atol=0.01)


def test_few_magnitudes_are_met_exactly() -> None:
    # Three magnitudes and three levels: nothing is left to chance.
    x = torch.tensor([1.0, 0.25, -0.0625, 0.25, -1.0, 0.0625, 0.0] * 10)
    assert torch.allclose(decoded(Adaptive(3), x), x, rtol=1e-6)


def test_large_buckets_count_for_more() -> None:
    r = torch.cat([torch.full((100,), 0.2), torch.full((100,), 0.8)]).double()
    weight = torch.cat([torch.full((100,), 1e-6), torch.ones(100)]).double()
    inner = fitted_levels(r, weight, 2)
    assert float(inner[0]) == pytest.approx(0.8)
    assert float(fitted_levels(r, weight.flip(0), 2)[0]) == pytest.approx(0.2)


@pytest.mark.parametrize("bits", [3, 4, 6])
@pytest.mark.parametrize("numel", [5000, 200_000])
def test_it_loses_less_than_qsgd_of_equal_bits_on_heavy_tails(bits, numel) -> None:
    for x, factor in ((laplacian(numel), 0.55), (student(numel), 0.35)):
        assert relative_error(Adaptive(bits), x) < factor * relative_error(QSGD(bits=bits), x)


@pytest.mark.parametrize("bits", [3, slow(4)])
def test_it_is_unbiased(bits) -> None:
    x, num_keys = laplacian(256).double(), 600
    codec = Adaptive(bits, bucket=64)
    found = torch.stack([decoded(codec, x, Key(7).at(i)) for i in range(num_keys)])
    error = (found - x).square().sum(dim=1).mean()
    bias = (found.mean(dim=0) - x).square().sum()
    assert float(bias) <= 1.3 * float(error) / num_keys
    assert float(error) <= codec.guarantee(Spec.of(x)).omega * float(x.square().sum())


@pytest.mark.parametrize("size", [4, 64, 100])
def test_omega_is_attained_by_one_level(size) -> None:
    r = torch.full((size,), 1 / (1 + size**0.5), dtype=torch.float64)
    r[0] = 1.0
    omega = Adaptive(3, bucket=size).guarantee(Spec((1000,), torch.float32)).omega
    assert float((r * (1 - r)).sum() / r.square().sum()) == pytest.approx(omega)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_the_wire_carries_the_bits_a_scale_per_bucket_and_the_levels(bits) -> None:
    numel = 5000
    payload, _ = Adaptive(bits).encode(laplacian(numel), None, Key(0))
    levels = 4 * (2 ** (bits - 1) - 2)
    size = -(-bits * numel // 8) + 4 * -(-numel // 512) + levels
    assert size <= payload.nbytes <= size + 24


def test_levels_of_nothing_or_zeros_are_even() -> None:
    for numel in (0, 10):
        payload, _ = Adaptive(4).encode(torch.zeros(numel), None, Key(0))
        assert torch.allclose(payload.parts["levels"].double(), even(7), rtol=1e-6)


@pytest.mark.parametrize("level", [float("nan"), float("inf"), -0.5, 1.5, 0.0])
def test_levels_that_do_not_ascend_are_refused(level) -> None:
    payload, _ = Adaptive(3).encode(laplacian(9), None, Key(0))
    crafted = payload.replace(levels=torch.tensor([0.25, level]))
    with pytest.raises(WireError, match="levels"):
        Adaptive(3).decode(crafted, Spec((9,), torch.float32), Key(0))


@pytest.mark.parametrize("make", [lambda: Adaptive(2), lambda: Adaptive(9), lambda: Adaptive(4, 0)])
def test_parameters_out_of_range_are_refused(make) -> None:
    with pytest.raises(ValueError, match="adaptive"):
        make()
