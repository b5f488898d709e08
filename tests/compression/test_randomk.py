"""Random-k: positions that all ranks draw alike, one from each of k strata."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.compression.sparsification.randomk import RandomK
from gradwire.core.codec import Algebra
from gradwire.core.key import Key
from gradwire.core.spec import Spec


def decoded(codec: RandomK, x: torch.Tensor, key: Key) -> torch.Tensor:
    payload, _ = codec.encode(x, None, key)
    return codec.decode(payload, Spec.of(x), key)


def positions(density: float, numel: int, key: Key) -> list[int]:
    x = torch.arange(1.0, numel + 1)
    kept = decoded(RandomK(density), x, key).nonzero().reshape(-1).tolist()
    assert RandomK(density).encode(x, None, key)[0].parts["values"].tolist() == [
        i + 1 for i in kept
    ]
    return kept


def test_all_ranks_keep_the_same_positions() -> None:
    key = Key(1).at(3).child("fc1")
    assert len({tuple(positions(0.2, 100, key.private(rank))) for rank in range(8)}) == 1


def test_a_payload_decodes_with_anyones_key() -> None:
    codec, x, key = RandomK(0.2), Key(9).normal(100), Key(1).at(3)
    payload, _ = codec.encode(x, None, key.private(0))
    mine = codec.decode(payload, Spec.of(x), key.private(0))
    assert torch.equal(mine, codec.decode(payload, Spec.of(x), key.private(5)))
    assert torch.equal(mine, codec.decode(payload, Spec.of(x), key.shared()))


def test_steps_and_tensors_keep_different_positions() -> None:
    key = Key(1)
    drawn = [positions(0.2, 100, k) for k in (key, key.at(1), key.child("a"), key.child("b"))]
    assert len({tuple(kept) for kept in drawn}) == 4


@given(st.integers(1, 500), st.floats(0.001, 1.0), st.integers(0, 1000))
def test_each_stratum_is_drawn_from_once(numel, density, step) -> None:
    k = min(numel, max(1, round(density * numel)))
    kept = positions(density, numel, Key(2).at(step))
    assert len(kept) == k
    for i, position in enumerate(kept):
        assert i * numel // k <= position < (i + 1) * numel // k


def test_every_element_is_kept_with_the_probability_of_its_stratum() -> None:
    numel, num_steps = 23, 1500
    counts = torch.zeros(numel)
    for step in range(num_steps):
        counts[positions(5 / 23, numel, Key(3).at(step))] += 1
    edges = [i * numel // 5 for i in range(6)]
    for low, high in pairwise(edges):
        p = 1 / (high - low)
        slack = 6 * math.sqrt(p * (1 - p) / num_steps)
        assert ((counts[low:high] / num_steps - p).abs() < slack).all()


def test_a_case_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    seen = {tuple(decoded(RandomK(0.5), x, Key(4).at(step)).tolist()) for step in range(60)}
    assert seen == {(1, 0, 3, 0), (1, 0, 0, 4), (0, 2, 3, 0), (0, 2, 0, 4)}
    seen = {tuple(decoded(RandomK(0.5, True), x, Key(4).at(s)).tolist()) for s in range(60)}
    assert seen == {(2, 0, 6, 0), (2, 0, 0, 8), (0, 4, 6, 0), (0, 4, 0, 8)}


def test_unbiased_means_that_the_average_is_the_tensor() -> None:
    x = torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0, -6.0, 7.0])  # strata of two, two and three
    num_steps = 1500
    total = sum(decoded(RandomK(3 / 7, True), x, Key(5).at(step)) for step in range(num_steps))
    sizes = torch.tensor([2, 2, 2, 2, 3, 3, 3])
    standard_error = x.abs() * ((sizes - 1) / num_steps).sqrt()
    assert ((total / num_steps - x).abs() <= 6 * standard_error).all()


def test_the_guarantee_is_that_of_the_largest_stratum() -> None:
    spec = Spec((7,), torch.float32)
    assert RandomK(3 / 7).guarantee(spec).delta == pytest.approx(1 / 3)
    assert RandomK(3 / 7, True).guarantee(spec).omega == pytest.approx(2.0)
    assert RandomK(0.01).guarantee(Spec((10_000,), torch.float32)).delta == pytest.approx(0.01)
    assert RandomK(0.01, True).guarantee(Spec((10_000,), torch.float32)).omega == 99.0


@pytest.mark.parametrize("numel", [0, 1, 100, 10_000])
def test_no_positions_travel(numel) -> None:
    payload, _ = RandomK(0.1).encode(torch.ones(numel), None, Key(0))
    k = min(numel, max(1, numel // 10))
    assert list(payload.parts) == ["values"]
    assert payload.nbytes <= 4 * k + 24


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, float("nan")])
def test_a_density_that_is_no_fraction_is_refused(density) -> None:
    with pytest.raises(ValueError, match="density is the fraction kept"):
        RandomK(density)


def test_independent_ranks_keep_positions_of_their_own() -> None:
    codec, x, key = RandomK(0.2, shared=False), torch.arange(1.0, 101.0), Key(1).at(3)
    payloads = [codec.encode(x, None, key.private(rank))[0] for rank in range(4)]
    assert len({tuple(payload.parts["values"].tolist()) for payload in payloads}) == 4
    for rank, payload in enumerate(payloads):
        found = codec.decode(payload, Spec.of(x), key.private(rank))
        assert torch.equal(found[found != 0], payload.parts["values"])
        assert torch.equal(found[found != 0], x[found != 0])
        assert list(payload.parts) == ["values"]  # the receiver knows the sender's key


def test_independent_payloads_do_not_add() -> None:
    assert RandomK(0.2).algebra is Algebra.LINEAR
    assert RandomK(0.2, shared=False).algebra is Algebra.OPAQUE


def test_independent_errors_average_out() -> None:
    x, num_ranks = Key(2).normal(1000), 16
    errors = {}
    for shared in (True, False):
        codec = RandomK(0.1, unbiased=True, shared=shared)
        mean = sum(decoded(codec, x, Key(1).private(r)) for r in range(num_ranks)) / num_ranks
        errors[shared] = float((mean - x).square().sum() / x.square().sum())
    assert errors[True] == pytest.approx(9, rel=0.3)
    assert errors[False] == pytest.approx(9 / num_ranks, rel=0.3)


def test_with_indices_no_key_is_needed() -> None:
    codec, x = RandomK(0.01, shared=False, indices=True), Key(2).normal(10_000)
    payload, _ = codec.encode(x, None, Key(1).private(3))
    mine = codec.decode(payload, Spec.of(x), Key(1).private(3))
    assert torch.equal(mine, codec.decode(payload, Spec.of(x), Key(99)))
    without = decoded(RandomK(0.01, shared=False), x, Key(1).private(3))
    assert torch.equal(mine, without)
    # A position in each of k strata: log2(100) = 6.6 bits each at the least.
    assert 8 * payload.nbytes / 100 <= 32 + 8.2 + 8 * 24 / 100


def test_indices_that_everybody_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="shared=False, indices=True"):
        RandomK(0.1, indices=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_what_scaling_takes_beyond_the_range_saturates(dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.full((100,), -largest / 3, dtype=dtype)
    codec = RandomK(0.1, unbiased=True)
    payload, _ = codec.encode(x, None, Key(0))
    decoded = codec.decode(payload, Spec.of(x), Key(0))
    assert sorted(set(decoded.tolist())) == [-largest, 0]
