"""Dryden et al. 2016: a fraction of each sign, as the mean of its sign."""

import pytest
import torch

from gradwire.coding.indices import index_entropy_bits
from gradwire.compression.sparsification.dryden import Dryden
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: Dryden, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def test_a_case_by_hand() -> None:
    x = torch.tensor([1.0, -0.5, 3.0, 0.0, 4.0, 2.0, -0.25])
    # Half of the four positive ones, half of the two negative ones.
    assert decoded(Dryden(0.5), x).tolist() == [0.0, -0.5, 3.5, 0.0, 3.5, 0.0, 0.0]


def test_the_proportion_is_that_of_each_sign() -> None:
    x = Key(1).normal(10_000) + 1.0
    found = decoded(Dryden(0.02), x)
    assert int((found > 0).sum()) == round(0.02 * int((x > 0).sum()))
    assert int((found < 0).sum()) == round(0.02 * int((x < 0).sum()))
    for sign in (1, -1):
        kept = sign * found > 0
        assert float(found[kept][0]) == pytest.approx(float(x[kept].mean()))
        assert (sign * x)[kept].min() >= (sign * x)[(sign * x > 0) & ~kept].max()


def test_a_side_without_elements_sends_none() -> None:
    x = torch.tensor([1.0, 2.0, 0.0])
    assert decoded(Dryden(0.5), x).tolist() == [0.0, 2.0, 0.0]
    assert decoded(Dryden(0.5), -x).tolist() == [0.0, -2.0, 0.0]


def test_a_position_and_a_bit_each() -> None:
    payload, _ = Dryden(0.01).encode(Key(3).normal(100_000), None, KEY)
    least = (index_entropy_bits(100_000, 1000) + 1000) / 8 + 8
    assert least <= payload.nbytes <= 1.05 * least + 24


@pytest.mark.parametrize("mean", [float("nan"), float("inf"), -1.0])
def test_a_mean_that_is_none_is_refused(mean) -> None:
    payload, _ = Dryden(0.5).encode(torch.ones(9), None, KEY)
    scale = torch.tensor([1.0, mean])
    with pytest.raises(WireError, match="scale"):
        Dryden(0.5).decode(payload.replace(scale=scale), Spec((9,), torch.float32), KEY)


@pytest.mark.parametrize("density", [0.0, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="dryden: density is the fraction kept"):
        Dryden(density)
