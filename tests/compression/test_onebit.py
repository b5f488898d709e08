"""Seide et al. 2014: each sign of a bucket decodes to its mean."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compression.quantization.onebit import OneBit
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: OneBit, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def test_a_case_by_hand() -> None:
    # First bucket: 3, 0 and 1 to 4/3; -2 alone. Second, cut short: -1 and -3 to -2, and 5.
    x = torch.tensor([3.0, 0.0, -2.0, 1.0, -1.0, 5.0, -3.0], dtype=torch.float64)
    found = decoded(OneBit(4), x).tolist()
    assert found == pytest.approx([4 / 3, 4 / 3, -2.0, 4 / 3, -2.0, 5.0, -2.0])


def test_the_bytes_of_a_case_by_hand() -> None:
    payload, _ = OneBit(4).encode(torch.tensor([3.0, -1.0, 1.0, -2.0, -4.0]), None, KEY)
    assert payload.parts["scale"].tolist() == [2.0, 1.5, 0.0, 4.0]  # magnitudes, + and - in turn
    assert payload.parts["values"].tolist() == [0b11010]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 20))
def test_each_value_is_the_centroid_of_those_it_stands_for(numbers, bucket) -> None:
    x = torch.tensor(numbers, dtype=torch.float64)
    found = decoded(OneBit(bucket), x)
    for start in range(0, len(numbers), bucket):
        own, values = x[start : start + bucket], found[start : start + bucket]
        for side in (own < 0, own >= 0):
            if side.any():
                expected = own[side].mean().expand(int(side.sum()))
                assert torch.allclose(values[side], expected, rtol=1e-12, atol=1e-9)


def test_no_other_two_values_lose_less() -> None:
    x = Key(1).normal(300).double()
    found = decoded(OneBit(300), x)
    least = float((found - x).square().sum())
    for up, down in [(0.01, 0.0), (-0.01, 0.0), (0.0, 0.01), (0.0, -0.01), (0.02, -0.01)]:
        moved = found + torch.where(x < 0, down, up)
        assert float((moved - x).square().sum()) > least


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 20))
def test_the_contraction(numbers, bucket) -> None:
    codec, x = OneBit(bucket), torch.tensor(numbers, dtype=torch.float64)
    energy = float(x.square().sum())
    delta = codec.guarantee(Spec.of(x)).delta
    assert delta == 1 / min(bucket, len(numbers))
    error = float((decoded(codec, x) - x).square().sum())
    assert error <= (1 - delta) * energy + 1e-9 * energy


def test_one_positive_element_is_the_worst_case() -> None:
    x = torch.zeros(512, dtype=torch.float64)
    x[17] = 4.0
    remaining = float((decoded(OneBit(), x) - x).square().sum() / x.square().sum())
    assert remaining == pytest.approx(1 - 1 / 512)


@pytest.mark.parametrize("numel", [0, 1, 7, 512, 513, 100_001])
def test_the_wire_carries_one_bit_an_element_and_two_floats_per_bucket(numel) -> None:
    payload, _ = OneBit().encode(torch.ones(numel), None, KEY)
    assert payload.nbytes <= -(-numel // 8) + 8 * -(-numel // 512) + 24


def test_the_means_of_large_magnitudes_do_not_overflow() -> None:
    for x in (
        torch.full((1000,), 3e38),
        torch.full((1000,), -60_000.0, dtype=torch.float16),
        torch.full((600,), 1.7e308, dtype=torch.float64),
    ):
        assert torch.allclose(decoded(OneBit(), x), x)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_a_value_that_is_no_magnitude_is_refused(scale) -> None:
    payload, _ = OneBit().encode(torch.ones(9), None, KEY)
    crafted = payload.replace(scale=torch.tensor([1.0, scale]))
    with pytest.raises(WireError, match="scale"):
        OneBit().decode(crafted, Spec((9,), torch.float32), KEY)


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="onebit: bucket"):
        OneBit(0)
