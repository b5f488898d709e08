"""Lin et al. 2018: at most k elements, above a threshold that a sample gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.compression.sparsification.sampledk import SampledK
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decoded(codec, x: torch.Tensor, key: Key = Key(0)) -> torch.Tensor:  # noqa: B008
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def test_a_short_vector_is_sampled_whole_so_it_is_top_k() -> None:
    x = Key(1).normal(500)
    assert torch.equal(decoded(SampledK(0.05), x), decoded(TopK(0.05), x))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=80),  # many ties
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.integers(0, 100),
)
def test_never_more_than_k_and_none_of_the_rest_is_larger(numbers, density, ratio, step) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    found = decoded(SampledK(density, ratio), x, Key(2).at(step))
    kept = found != 0
    assert torch.equal(found[kept], x[kept])
    assert int(kept.sum()) <= min(len(numbers), max(1, round(density * len(numbers))))
    if kept.any() and not kept.all():
        assert x[~kept].abs().max() <= x[kept].abs().min()
    assert kept.any() == x.any()


def test_the_sample_finds_most_of_the_top_k() -> None:
    x, k = Key(3).normal(200_000), 2000
    codec, keys = SampledK(0.01, 0.05), [Key(4).at(step) for step in range(20)]
    counts = [int(decoded(codec, x, key).count_nonzero()) for key in keys]
    assert max(counts) == k  # about half of all samples let more pass, which is then cut
    assert min(counts) > 0.6 * k  # 100 of the sample pass: six deviations of a tenth
    assert len(set(counts)) > 1


def test_a_vector_of_equal_elements_sends_k_of_them() -> None:
    assert int(decoded(SampledK(0.1), torch.ones(1000)).sum()) == 100


def test_positions_and_values_cost_41_bits_each() -> None:
    payload, _ = SampledK(0.01).encode(Key(3).normal(200_000), None, Key(0))
    assert 8 * payload.nbytes / payload.parts["values"].numel() <= 41


@pytest.mark.parametrize("density", [0.0, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="sampledk: density is the fraction kept"):
        SampledK(density)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.1, float("nan")])
def test_a_sample_that_is_no_fraction_is_refused(ratio) -> None:
    with pytest.raises(ValueError, match="sampledk: sample_ratio is the fraction"):
        SampledK(0.1, ratio)
