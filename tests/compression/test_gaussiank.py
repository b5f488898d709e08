"""Shi et al. 2019: a threshold from the normal distribution, adjusted a few times."""

import pytest
import torch

from gradwire.compression.sparsification.gaussiank import GaussianK
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: GaussianK, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("deviation", [1e-6, 1.0, 1e6])
def test_a_normal_vector_keeps_its_density(density, deviation) -> None:
    x = Key(1).normal(200_000) * deviation
    found = decoded(GaussianK(density), x)
    kept = found != 0
    assert torch.equal(found[kept], x[kept])
    assert x[~kept].abs().max() < x[kept].abs().min()
    k = density * 200_000
    assert abs(int(kept.sum()) - k) < 6 * k**0.5


def test_the_threshold_is_raised_where_too_many_pass() -> None:
    # One huge element aside, of 1000 equal magnitudes either all or none pass.
    x = torch.ones(1000)
    x[0] = 1e4
    assert decoded(GaussianK(0.001), x).nonzero().tolist() == [[0]]


def test_the_threshold_is_lowered_where_too_few_pass() -> None:
    # Uniform on (-1, 1): 2.58 / sqrt(3) = 1.49 lets none pass, half of it 26%, which is too many,
    # then 1.12 none, 0.56 too many; the last is 0.84, and its 16% are cut to twice the density.
    x = torch.linspace(-1, 1, 1001)
    found = decoded(GaussianK(0.01), x)
    assert int(found.count_nonzero()) == 20
    assert float(found[found != 0].abs().min()) >= 0.98


@pytest.mark.parametrize("value", [3.0, -0.1, 1e-30])
def test_of_equal_elements_some_are_sent_but_not_all(value) -> None:
    found = decoded(GaussianK(0.1), torch.full((100,), value))
    assert 10 <= int(found.count_nonzero()) <= 20


def test_large_elements_do_not_overflow() -> None:
    x = Key(1).normal(1000) * 1e37
    assert 0 < int(decoded(GaussianK(0.01), x).count_nonzero()) <= 20


def test_positions_and_values_cost_41_bits_each() -> None:
    payload, _ = GaussianK(0.01).encode(Key(3).normal(200_000), None, KEY)
    assert 8 * payload.nbytes / payload.parts["values"].numel() <= 41


@pytest.mark.parametrize("density", [0.0, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="gaussiank: density is the fraction kept"):
        GaussianK(density)
