"""Sattler et al. 2019: one side of the vector, positions and one mean."""

import pytest
import torch

from gradwire.coding.indices import index_entropy_bits
from gradwire.compression.quantization.fp16 import FP16
from gradwire.compression.sparsification.sbc import SBC
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: SBC, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def test_a_case_by_hand() -> None:
    x = torch.tensor([0.5, -3.0, 1.0, 0.0, 2.0, -4.0])
    # k = 2: the largest have the mean 1.5, the smallest -3.5.
    assert decoded(SBC(1 / 3), x).tolist() == [0.0, -3.5, 0.0, 0.0, 0.0, -3.5]
    assert decoded(SBC(1 / 3), -x).tolist() == [0.0, 3.5, 0.0, 0.0, 0.0, 3.5]


def test_sides_of_equal_mean_send_the_positive_one() -> None:
    assert decoded(SBC(0.25), torch.tensor([1.0, -1.0, 0.5, -0.5])).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_what_is_gained_is_k_times_the_squared_mean() -> None:
    for step in range(20):
        x = Key(1).at(step).normal(200).double()
        found = decoded(SBC(0.1), x)
        mean = float(found[found != 0][0])
        gained = float(x.square().sum() - (x - found).square().sum())
        assert gained == pytest.approx(20 * mean**2)
        assert len(found[found != 0].unique()) == 1


def test_a_message_is_its_positions_and_one_number() -> None:
    payload, _ = SBC(0.01).encode(Key(3).normal(100_000), None, KEY)
    least = index_entropy_bits(100_000, 1000) / 8 + 4
    assert least <= payload.nbytes <= 1.05 * least + 24


def test_there_is_nothing_left_to_quantise() -> None:
    with pytest.raises(ValueError, match="leaves nothing to encode"):
        SBC(0.01) >> FP16()


@pytest.mark.parametrize("mean", [float("nan"), float("inf"), -float("inf")])
def test_a_mean_that_is_none_is_refused(mean) -> None:
    payload, _ = SBC(0.5).encode(torch.ones(9), None, KEY)
    with pytest.raises(WireError, match="mean"):
        SBC(0.5).decode(payload.replace(mean=torch.tensor([mean])), Spec((9,), torch.float32), KEY)


@pytest.mark.parametrize("density", [0.0, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="sbc: density is the fraction kept"):
        SBC(density)
