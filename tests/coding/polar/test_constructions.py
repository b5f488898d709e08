"""Constructions: each against a case worked by hand, and all against what they share."""

import math

import pytest
import torch

from gradwire.coding.polar import (
    bhattacharyya,
    free_positions,
    gaussian_approximation,
    monte_carlo,
    polarization_weight,
    tal_vardy,
)
from gradwire.coding.polar.channel import (
    binary_entropy,
    bsc_ratio,
    distortion_bound,
)
from gradwire.coding.polar.construction import CONSTRUCTIONS, lowest


def exact_entropies(n: int, distortion: float) -> torch.Tensor:
    """H(u_i | y, u_0 .. u_i-1) of BSC(D), by going through all inputs and outputs."""
    words = torch.arange(2**n)
    bits = words[:, None] >> torch.arange(n - 1, -1, -1) & 1  # u_0 is the most significant
    matrix = torch.ones(1, 1, dtype=torch.int64)
    while len(matrix) < n:
        matrix = torch.kron(torch.tensor([[1, 0], [1, 1]]), matrix)
    sent = bits @ matrix % 2
    wrong = (sent[:, None] != bits[None, :]).sum(dim=2)  # [inputs, outputs]
    wrong = wrong.to(torch.float64)
    joint = distortion**wrong * (1 - distortion) ** (n - wrong) / 2.0**n
    left = []
    for i in range(n + 1):  # H(y, u_0 .. u_i-1)
        some = joint.view(2**i, -1, 2**n).sum(dim=1)
        left.append(-torch.xlogy(some, some).sum() / math.log(2))
    return torch.stack([left[i + 1] - left[i] for i in range(n)])


def test_the_distortion_at_half_a_bit_is_eleven_percent() -> None:
    assert distortion_bound(0.5) == pytest.approx(0.1100279, abs=1e-6)
    assert 1 - binary_entropy(distortion_bound(0.3)) == pytest.approx(0.3)
    assert bsc_ratio(0.11) == round(8 * math.log(0.89 / 0.11)) == 17
    assert bsc_ratio(0.0) == 127


def test_bhattacharyya_by_hand() -> None:
    z = 2 * math.sqrt(0.1 * 0.9)  # 0.6
    worse, better = 2 * z - z**2, z**2  # 0.84, 0.36
    expected = [2 * worse - worse**2, worse**2, 2 * better - better**2, better**2]
    found = bhattacharyya.scores(4, 0.1).sigmoid()
    assert found.tolist() == pytest.approx(expected)
    assert found.tolist() == pytest.approx([0.9744, 0.7056, 0.5904, 0.1296])


def test_bhattacharyya_keeps_its_digits() -> None:
    found = bhattacharyya.scores(2**14, 0.11)
    assert bool(torch.isfinite(found).all())
    assert found.unique().numel() > 2**13


def test_polarization_weight_by_hand() -> None:
    beta = 2**0.25
    expected = [0, 1, beta, 1 + beta, beta**2, 1 + beta**2, beta + beta**2, 1 + beta + beta**2]
    assert (-polarization_weight.scores(8)).tolist() == pytest.approx(expected)


def test_polarization_weight_keeps_the_partial_order() -> None:
    # A one more, or a one moved to a higher digit, never makes an input worse, on any channel.
    n, digits = 256, 8
    found = polarization_weight.scores(n)
    index = torch.arange(n)
    for j in range(digits):
        without = index[(index >> j & 1) == 0]
        assert bool((found[without | 1 << j] < found[without]).all())
        if j + 1 < digits:
            low = index[(index >> j & 3) == 1]
            assert bool((found[low + (1 << j)] < found[low]).all())


# Not monte_carlo: its integers overstate small ratios, so the worst inputs come in any order.
@pytest.mark.parametrize("name", sorted(set(CONSTRUCTIONS) - {"monte_carlo"}))
def test_a_one_more_makes_an_input_better(name) -> None:
    n = 64
    found = CONSTRUCTIONS[name](n, 0.11).to(torch.float64)
    index = torch.arange(n)
    for j in range(6):
        without = index[(index >> j & 1) == 0]
        assert bool((found[without | 1 << j] <= found[without]).all())


def test_without_merging_density_evolution_is_exact() -> None:
    for distortion in (0.05, 0.11, 0.3):
        found = tal_vardy.scores(2, distortion)
        combined = 2 * distortion * (1 - distortion)
        second = 2 * binary_entropy(distortion) - binary_entropy(combined)
        assert found.tolist() == pytest.approx([binary_entropy(combined), second])


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("distortion", [0.05, 0.2])
def test_density_evolution_bounds_the_entropies_from_above(n, distortion) -> None:
    exact = exact_entropies(n, distortion)
    assert float(exact.sum()) == pytest.approx(n * binary_entropy(distortion))
    coarse, fine = (tal_vardy.scores(n, distortion, bins) for bins in (8, 128))
    assert bool((fine >= exact - 1e-12).all())
    assert bool((coarse >= exact - 1e-12).all())
    assert float((fine - exact).max()) < 1e-3
    assert float((fine - exact).sum()) <= float((coarse - exact).sum()) + 1e-12


def test_drawing_comes_to_the_same_entropies() -> None:
    groups, n, distortion = 512, 8, 0.11
    found = monte_carlo.scores(n, distortion, groups).to(torch.float64) / (groups * 64 * 2**20)
    # Ratios are whole eighths of a nat and f is not exact, hence the tolerance.
    assert found.tolist() == pytest.approx(exact_entropies(n, distortion).tolist(), abs=0.03)


def test_gaussian_approximation_by_hand() -> None:
    mean = gaussian_approximation.matched_mean(0.5)
    doubled = gaussian_approximation.scores(4, distortion_bound(0.5))
    assert float(-doubled[3]) == pytest.approx(4 * mean, rel=1e-6)
    # 1 - E tanh(L/2) of f's output is 1 - (1 - phi)^2, with E by brute force.
    nodes = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    weights = torch.exp(-nodes * nodes / 2)
    weights /= weights.sum()

    def phi(m: float) -> float:
        return float((weights * (1 - torch.tanh((m + math.sqrt(2 * m) * nodes) / 2))).sum())

    for m in (0.01, 0.3, 2.0, 9.0, 30.0):
        lower = float(gaussian_approximation.check(torch.tensor([m], dtype=torch.float64)))
        assert phi(lower) == pytest.approx(1 - (1 - phi(m)) ** 2, rel=1e-3)
        assert lower < m


def test_the_capacity_of_the_first_mean_is_the_rate() -> None:
    nodes = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weights = torch.exp(-nodes * nodes / 2)
    mean = gaussian_approximation.matched_mean(0.3)
    unknown = torch.log2(1 + torch.exp(-(mean + math.sqrt(2 * mean) * nodes)))
    assert 1 - float((weights * unknown).sum() / weights.sum()) == pytest.approx(0.3, abs=1e-6)


def test_of_equal_scores_the_last_are_free() -> None:
    assert lowest(torch.tensor([3, 1, 1, 1]), 2).tolist() == [False, False, True, True]


@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS))
def test_k_positions_are_free_and_mostly_late_ones(name) -> None:
    for n, k in ((64, 1), (128, 40), (256, 200)):
        free = free_positions(n, k, name)
        assert free.dtype == torch.bool
        assert int(free.sum()) == k
        assert bool(free[-1])
        assert int(free[n // 2 :].sum()) >= k / 2
    assert not free_positions(64, 0, name).any()
    assert free_positions(64, 64, name).all()


def test_errors_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="2\\^m"):
        free_positions(100, 10)
    with pytest.raises(ValueError, match=r"0 \.\. 64 can be free, got k = 65"):
        free_positions(64, 65)
    with pytest.raises(ValueError, match="there are monte_carlo, tal_vardy"):
        free_positions(64, 32, "magic")
