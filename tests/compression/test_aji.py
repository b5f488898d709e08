"""Aji and Heafield 2017: one absolute threshold from a sample."""

import pytest
import torch

from gradwire.compression.sparsification.aji import Aji
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decoded(codec: Aji, x: torch.Tensor, key: Key = Key(0)) -> torch.Tensor:  # noqa: B008
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def test_a_case_by_hand() -> None:
    x = torch.tensor([0.5, -3.0, 1.0, 0.0, 2.0])  # so short that all of it is the sample
    assert decoded(Aji(0.4), x).tolist() == [0.0, -3.0, 0.0, 0.0, 2.0]


def test_all_that_reach_the_threshold_are_sent_as_they_are() -> None:
    x = Key(1).normal(50_000)
    counts = []
    for step in range(20):
        found = decoded(Aji(0.01, sample=0.05), x, Key(2).at(step))
        kept = found != 0
        assert torch.equal(found[kept], x[kept])
        assert x[~kept].abs().max() < x[kept].abs().min()
        counts.append(int(kept.sum()))
    # 64 of the sample lie above: the error of a count is about an eighth of 500.
    assert 440 <= sum(counts) / len(counts) <= 560
    assert max(counts) <= 1000
    assert min(counts) < 500 < max(counts)  # both sides, unlike sampledk


def test_never_more_than_twice_the_density() -> None:
    x = torch.ones(1000)  # all of them reach any threshold
    assert int(decoded(Aji(0.1), x).sum()) == 200


def test_ranks_sample_differently() -> None:
    x = Key(3).normal(50_000)
    a, b = (decoded(Aji(0.01), x, Key(2).private(rank)) for rank in range(2))
    assert not torch.equal(a, b)


def test_positions_and_values_cost_41_bits_each() -> None:
    payload, _ = Aji(0.01).encode(Key(3).normal(200_000), None, Key(0))
    assert 8 * payload.nbytes / payload.parts["values"].numel() <= 41


@pytest.mark.parametrize("density", [0.0, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="aji: density is the fraction kept"):
        Aji(density)


@pytest.mark.parametrize("sample", [0.0, 1.1, float("nan")])
def test_a_sample_that_is_no_fraction_is_refused(sample) -> None:
    with pytest.raises(ValueError, match="aji: sample is the fraction"):
        Aji(0.1, sample)
