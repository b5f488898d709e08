"""Abdelmoniem et al. 2021: exponential fits to ever farther tails."""

import math

import pytest
import torch

from gradwire.compression.sparsification.sidco import SIDCo
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: SIDCo, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def laplacian(numel: int) -> torch.Tensor:
    centred = Key(4).uniform64(numel) - 0.5
    return (-centred.sign() * torch.log1p(-2 * centred.abs())).float()


def test_one_stage_is_the_quantile_of_an_exponential() -> None:
    x = laplacian(10_000)
    found = decoded(SIDCo(0.1, stages=1), x)
    threshold = float(x.abs().mean()) * math.log(10)
    assert torch.equal(found, torch.where(x.abs() >= threshold, x, 0.0))


def test_two_stages_by_hand() -> None:
    # A quarter above b log 4; of the mean excess of those, log(1 / 0.4) more.
    x = Key(3).normal(10_000)
    first = float(x.abs().double().mean()) * math.log(4)
    excess = float(x.abs()[x.abs() >= first].double().mean()) - first
    second = first + excess * math.log(2.5)
    found = decoded(SIDCo(0.1, stages=2), x)
    assert torch.equal(found, torch.where(x.abs() >= second, x, 0.0))


@pytest.mark.parametrize("density", [0.5, 0.1, 0.01, 0.001])
def test_the_density_is_met_on_laplacian_and_nearly_on_normal_vectors(density) -> None:
    k = density * 200_000
    for x, most in ((laplacian(200_000), 1.0), (Key(3).normal(200_000), 1.3)):
        count = int(decoded(SIDCo(density), x).count_nonzero())
        assert k - 6 * k**0.5 <= count <= most * k + 6 * k**0.5


def test_stages_help_where_the_tail_is_not_exponential() -> None:
    x, k = Key(3).normal(200_000), 2000
    errors = [
        abs(int(decoded(SIDCo(0.01, stages=m), x).count_nonzero()) / k - 1) for m in (1, 2, 4)
    ]
    assert errors[0] > 0.9  # a single fit finds almost nothing
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("density", [1.0, 0.25, 0.1, 0.01, 1e-6])
@pytest.mark.parametrize("stages", [1, 2, 20])
def test_the_ratios_multiply_to_the_density(density, stages) -> None:
    ratios = SIDCo(density, stages).ratios()
    assert len(ratios) <= stages
    assert math.prod(ratios) == pytest.approx(density)
    assert all(0 < ratio <= 1 for ratio in ratios)


def test_equal_elements_send_as_many_as_the_density_says() -> None:
    assert int(decoded(SIDCo(0.1), torch.full((100,), 3.0)).count_nonzero()) == 10


def test_never_more_than_twice_the_density() -> None:
    x = torch.zeros(1000)
    x[:500] = 1.0  # half of the elements lie above the mean times log(1 / 0.4)
    assert int(decoded(SIDCo(0.4, stages=1), x).count_nonzero()) == 500
    assert int(decoded(SIDCo(0.2, stages=1), x).count_nonzero()) == 400


def test_positions_and_values_cost_41_bits_each() -> None:
    payload, _ = SIDCo(0.01).encode(laplacian(200_000), None, KEY)
    assert 8 * payload.nbytes / payload.parts["values"].numel() <= 41


@pytest.mark.parametrize("density", [0.0, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="sidco: density is the fraction kept"):
        SIDCo(density)


@pytest.mark.parametrize("stages", [0, -1, 21])
def test_stages_out_of_range_are_refused(stages) -> None:
    with pytest.raises(ValueError, match=r"sidco: stages must lie in 1 \.\. 20"):
        SIDCo(0.1, stages)
