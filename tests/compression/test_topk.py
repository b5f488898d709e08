"""Stich et al. 2018: the k elements of largest magnitude."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.coding.indices import index_entropy_bits
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

KEY = Key(0)


def decoded(codec: TopK, x: torch.Tensor) -> torch.Tensor:
    payload, _ = codec.encode(x, None, KEY)
    return codec.decode(payload, Spec.of(x), KEY)


def test_a_case_by_hand() -> None:
    x = torch.tensor([0.5, -3.0, 1.0, 0.0, 2.0])
    assert decoded(TopK(0.4), x).tolist() == [0.0, -3.0, 0.0, 0.0, 2.0]


@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=60),  # many ties
    st.floats(0.01, 1.0),
)
def test_the_kept_are_entries_and_none_of_the_rest_is_larger(numbers, density) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    payload, _ = TopK(density).encode(x, None, KEY)
    k = payload.parts["values"].numel()
    assert k == min(len(numbers), max(1, round(density * len(numbers))))
    found = decoded(TopK(density), x)
    kept = found != 0
    assert torch.equal(found[kept], x[kept])
    # Ties are harmless: whichever were taken, the magnitudes are the k largest.
    largest = x.abs().sort(descending=True).values[:k]
    assert torch.equal(payload.parts["values"].abs().sort(descending=True).values, largest)
    energy, error = float(x.square().sum()), float((x - found).square().sum())
    assert error * len(numbers) <= (len(numbers) - k) * energy


def test_all_elements_equal_is_the_worst_case() -> None:
    x = torch.ones(100)
    remaining = float((decoded(TopK(0.3), x) - x).square().sum() / x.square().sum())
    assert remaining == pytest.approx(1 - TopK(0.3).guarantee(Spec.of(x)).delta)


def test_a_density_of_one_keeps_everything() -> None:
    x = Key(1).normal(1000)
    assert torch.equal(decoded(TopK(1.0), x), x)


def test_at_least_one_element_is_kept() -> None:
    x = torch.tensor([1.0, -2.0, 0.5])
    assert decoded(TopK(1e-9), x).tolist() == [0.0, -2.0, 0.0]


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("numel", [1000, 100_000])
def test_positions_cost_little_more_than_their_entropy(density, numel) -> None:
    payload, _ = TopK(density).encode(Key(3).normal(numel), None, KEY)
    k = round(density * numel)
    index_bytes = payload.nbytes - 4 * k
    entropy = index_entropy_bits(numel, k) / 8
    header = 40
    assert entropy <= index_bytes <= numel / 8 + header  # never more than a bitmap
    if density <= 0.1:
        assert index_bytes <= 1.05 * entropy + header


def test_the_bound_of_one_per_cent_in_bytes() -> None:
    payload, _ = TopK(0.01).encode(Key(3).normal(100_000), None, KEY)
    # Four bytes of value and about one of position: 5 of 400.
    assert payload.nbytes < 1000 * (4 + 1.05)


def test_a_kept_element_costs_41_bits_off_the_wire() -> None:
    """Its float32 and its position, all headers included; its entropy is 8.08 + 32."""
    numel, k = 1_000_000, 10_000
    payload, _ = TopK(0.01).encode(Key(3).normal(numel), None, KEY)
    assert 8 * payload.nbytes <= 41 * k
    index_bits = 8 * payload.nbytes - 32 * k
    assert index_entropy_bits(numel, k) <= index_bits <= 1.05 * 8.08 * k


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, float("nan"), float("inf")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="density is the fraction kept"):
        TopK(density)


def test_positions_beyond_the_tensor_are_refused() -> None:
    codec = TopK(0.1)
    payload, _ = codec.encode(Key(1).normal(1000), None, KEY)
    foreign, _ = codec.encode(Key(1).normal(2000), None, KEY)
    crafted = payload.replace(indices=foreign.parts["indices"])
    with pytest.raises(WireError):
        codec.decode(crafted, Spec((1000,), torch.float32), KEY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_values_travel_in_the_tensors_own_dtype(dtype) -> None:
    payload, _ = TopK(0.5).encode(torch.arange(8.0).to(dtype), None, KEY)
    assert payload.parts["values"].dtype == dtype
