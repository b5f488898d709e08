"""Karimireddy et al. 2019: C(x) = (|x|_1 / d) sign(x)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compression import COMPRESSION
from gradwire.compression.quantization.sign import Sign
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(x: torch.Tensor) -> torch.Tensor:
    payload, _ = Sign().encode(x, None, KEY)
    return Sign().decode(payload, Spec.of(x), KEY)


def test_a_case_by_hand() -> None:
    # The mean magnitude is 6/4, and zero counts as positive.
    assert decoded(torch.tensor([3.0, -1.0, 0.0, -2.0])).tolist() == [1.5, -1.5, 1.5, -1.5]


def test_the_bytes_of_a_case_by_hand() -> None:
    payload, _ = Sign().encode(torch.tensor([3.0, -1.0, 0.0, -2.0]), None, KEY)
    assert payload.parts["scale"].tolist() == [1.5]
    assert payload.parts["values"].tolist() == [0b1010]  # ones where x < 0, lowest bit first


def test_negative_zero_is_positive() -> None:
    assert decoded(torch.tensor([-0.0, -2.0])).tolist() == [1.0, -1.0]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_the_contraction_is_exactly_that_of_the_paper(numbers) -> None:
    x = torch.tensor(numbers, dtype=torch.float64)
    energy = float(x.square().sum())
    error = float((decoded(x) - x).square().sum())
    # |C(x) - x|^2 = (1 - delta) |x|_2^2 with delta = |x|_1^2 / (d |x|_2^2), zeros included.
    expected = energy - float(x.abs().sum()) ** 2 / len(numbers)
    assert error == pytest.approx(expected, rel=1e-9, abs=1e-9 * energy + 1e-300)


def test_for_a_gaussian_delta_is_two_over_pi() -> None:
    x = Key(1).normal(200_000).double()
    remaining = float((decoded(x) - x).square().sum() / x.square().sum())
    assert remaining == pytest.approx(1 - 2 / torch.pi, abs=0.01)


def test_a_one_hot_vector_is_the_worst_case() -> None:
    x = torch.zeros(100, dtype=torch.float64)
    x[17] = -4.0
    delta = Sign().guarantee(Spec.of(x)).delta
    assert delta == 1 / 100
    remaining = float((decoded(x) - x).square().sum() / x.square().sum())
    assert remaining == pytest.approx(1 - delta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000, 100_001])
def test_the_wire_carries_one_bit_an_element(numel, dtype) -> None:
    payload, _ = Sign().encode(torch.ones(numel, dtype=dtype), None, KEY)
    assert payload.nbytes <= -(-numel // 8) + 32


def test_the_mean_of_large_magnitudes_does_not_overflow() -> None:
    x = torch.full((1000,), 3e38)
    assert torch.equal(decoded(x), x)
    y = torch.full((1000,), -60_000.0, dtype=torch.float16)
    assert torch.equal(decoded(y), y)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, -1e-30])
def test_a_scale_that_is_no_mean_magnitude_is_refused(scale) -> None:
    payload, _ = Sign().encode(torch.ones(9), None, KEY)
    crafted = payload.replace(scale=torch.tensor([scale]))
    with pytest.raises(WireError, match="scale"):
        Sign().decode(crafted, Spec((9,), torch.float32), KEY)


@pytest.mark.parametrize("method", ["sign", "sign(bucket=64)", "sign >> polar(0.5, block=256)"])
def test_the_mean_of_very_large_numbers_does_not_overflow(method) -> None:
    x, codec = Key(seed=1).normal(1000).clamp(-4, 4).double(), COMPRESSION.parse(method)
    heard = []
    for scale in (1.0, 2.0**1021):
        payload, _ = codec.encode(x * scale, codec.init(Spec.of(x)), Key(seed=1))
        heard.append(codec.decode(payload, Spec.of(x), Key(seed=1)) / scale)
    assert torch.equal(*heard)
