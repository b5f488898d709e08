"""Horvath et al. 2019: to a neighbouring power of two, with variance at most 1/8."""

import math

import pytest
import torch
from torch import Tensor

from gradwire.compression.quantization.natural import Natural
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)
CODEC = Natural()


def decoded(x: Tensor, key: Key = KEY) -> Tensor:
    payload, _ = CODEC.encode(x, None, key)
    return CODEC.decode(payload, Spec.of(x), key)


def test_a_case_by_hand() -> None:
    # -2.75 is -2 with probability 5/8 and -4 with 3/8.
    found = decoded(torch.full((40_000,), -2.75))
    assert set(found.tolist()) == {-2.0, -4.0}
    fours = int((found == -4).sum())
    assert abs(fours - 15_000) < 6 * math.sqrt(40_000 * 15 / 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_powers_of_two_and_zero_are_exact(dtype) -> None:
    low, high = {torch.float16: (-24, 15), torch.float64: (-1022, 1023)}.get(dtype, (-126, 127))
    powers = torch.tensor([2.0**e for e in range(low, high + 1)], dtype=dtype)
    x = torch.cat([powers, -powers, torch.zeros(3, dtype=dtype)])
    for step in range(3):
        assert torch.equal(decoded(x, Key(1).at(step)), x)


@pytest.mark.parametrize("t", [1.0, 1.1, 4 / 3, 1.5, 1.9])
def test_the_variance_is_exactly_that_of_the_paper(t) -> None:
    x = torch.full((100_000,), t, dtype=torch.float64) * 2.0**-9
    errors = (decoded(x) - x).square() / x.square()
    expected = (t - 1) * (2 - t) / t**2  # at most 1/8, reached at 4/3
    slack = 6 * float(errors.std()) / math.sqrt(len(x)) + 1e-4 * expected
    assert abs(float(errors.mean()) - expected) <= slack
    assert expected <= CODEC.guarantee(Spec.of(x)).omega + 1e-12


def test_the_mean_is_the_element() -> None:
    x = Key(3).normal(300_000).double()
    found = decoded(x)
    slope = float((found * x).sum() / x.square().sum())
    assert slope == pytest.approx(1.0, abs=6 * math.sqrt(3 / 8 / len(x)))


def test_subnormal_numbers_become_the_smallest_normal_or_zero_without_bias() -> None:
    smallest = 2.0**-126
    found = decoded(torch.full((40_000,), smallest / 4)).double()
    assert set(found.tolist()) == {0.0, smallest}
    assert float(found.mean()) == pytest.approx(smallest / 4, rel=6 * math.sqrt(3 / 40_000))


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.float32, 127), (torch.bfloat16, 127), (torch.float16, 15), (torch.float64, 1023)],
)
def test_the_largest_numbers_do_not_become_infinite(dtype, exponent) -> None:
    largest = torch.finfo(dtype).max
    found = decoded(torch.tensor([largest, -largest], dtype=dtype))
    assert found.tolist() == [2.0**exponent, -(2.0**exponent)]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float32, 9), (torch.bfloat16, 9), (torch.float16, 7), (torch.float64, 12)],
)
@pytest.mark.parametrize("numel", [0, 1, 1000, 100_001])
def test_the_wire_carries_sign_and_exponent(numel, dtype, bits) -> None:
    payload, _ = CODEC.encode(torch.ones(numel, dtype=dtype), None, KEY)
    assert payload.nbytes <= math.ceil(bits * numel / 8) + 16


def test_an_exponent_that_float32_does_not_have_is_refused() -> None:
    payload, _ = CODEC.encode(torch.ones(8), None, KEY)
    crafted = payload.replace(values=torch.full((9,), 0xFF, dtype=torch.uint8))
    with pytest.raises(WireError, match="symbol 511"):
        CODEC.decode(crafted, Spec((8,), torch.float32), KEY)
