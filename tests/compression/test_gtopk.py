"""gTop-k: the tree of merges, its bytes, and the paper's feedback."""

import math

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.compression.feedback.ef import EF
from gradwire.compression.sparsification.gtopk import GTopK
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

NUMEL = 200


def gradients(size: int, num_steps: int = 1, numel: int = NUMEL):
    return [
        [Key(4).at(step).private(rank).normal(numel).double() for step in range(num_steps)]
        for rank in range(size)
    ]


@pytest.mark.parametrize("architecture", [AllReduce(), Ring()], ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
def test_disjoint_supports_that_fit_are_exact(reduce, size, architecture) -> None:
    inputs = []
    for rank in range(size):
        x = torch.zeros(NUMEL, dtype=torch.float64)
        x[rank :: size * 10] = 1.0 + rank
        inputs.append([x])
    results, _ = reduce(GTopK(0.2), inputs, architecture=architecture)
    exact = torch.stack([x for (x,) in inputs]).mean(dim=0)
    for rank, (result,) in enumerate(results):
        assert torch.allclose(result.mean, exact, rtol=1e-15, atol=0)
        assert torch.equal(result.own(), inputs[rank][0])


def test_two_workers_by_hand(reduce) -> None:
    x = torch.tensor([5.0, 4.0, 0.0, 1.0, 0.0, 0.0])
    y = torch.tensor([0.0, 3.0, -6.0, 0.0, 0.5, 0.0])
    # k = 2: x sends 5, 4 at 0, 1; y sends 3, -6 at 1, 2; of 5, 7, -6 the sum keeps 7 and -6.
    (a, b), _ = reduce(EF(GTopK(1 / 3)), [[x], [y]])
    assert a[0].mean.tolist() == b[0].mean.tolist() == [0, 3.5, -3, 0, 0, 0]
    assert a[0].state["residual"].tolist() == [5, 0, 0, 1, 0, 0]  # the rejected 5 comes back
    assert b[0].state["residual"].tolist() == [0, 0, 0, 0, 0.5, 0]
    assert a[0].own().tolist() == [0, 4, 0, 0, 0, 0]
    assert b[0].own().tolist() == [0, 3, -6, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_everyone_ends_with_the_same_k_elements(reduce, size) -> None:
    results, _ = reduce(GTopK(0.1), gradients(size))
    for (result,) in results:
        assert torch.equal(result.mean, results[0][0].mean)
        assert result.mean.count_nonzero() == 20


@pytest.mark.parametrize("size", [2, 3, 4, 8, 9, 16])
def test_bytes_grow_with_the_logarithm(reduce, size) -> None:
    numel = 4000
    inputs = [[steps[0].float()] for steps in gradients(size, numel=numel)]
    _, engine = reduce(GTopK(0.01), inputs)
    payload = TopK(0.01).encode(inputs[0][0], None, Key(0))[0].nbytes
    levels = math.ceil(math.log2(size))
    assert engine.ledger.total_messages == 2 * (size - 1)
    for rank in range(size):  # nobody sends more than one message per level, each way
        assert engine.ledger.sent_by(rank) <= (levels + 1) * 1.1 * payload
    assert engine.ledger.sent_by(0) == pytest.approx(levels * payload, rel=0.1)
    # 40 of 4000 elements, 32 bits of value and about 8 of position each.
    assert 8 * payload / 40 < 45


@pytest.mark.parametrize("size", [1, 2])
def test_with_two_workers_nothing_is_lost(reduce, size) -> None:
    inputs = gradients(size, 10)
    results, _ = reduce(EF(GTopK(0.05)), inputs)
    applied = size * sum(result.mean for result in results[0])
    held = sum(steps[-1].state["residual"] for steps in results)
    everything = sum(x for steps in inputs for x in steps)
    assert torch.allclose(applied + held, everything, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_from_three_on_only_what_a_branch_dropped_at_a_global_position_is_lost(
    reduce, size
) -> None:
    inputs = gradients(size)
    results, _ = reduce(EF(GTopK(0.05)), inputs)
    mean = results[0][0].mean
    held = sum(steps[-1].state["residual"] for steps in results)
    missing = size * mean + held - sum(x for (x,) in inputs)
    elsewhere = mean == 0
    assert torch.allclose(missing[elsewhere], torch.zeros(()).double(), rtol=0, atol=1e-12)
    # What is missing was selected by someone: the paper's rule takes it for heard.
    selected = torch.stack([TopK(0.05).decode(*_sent(x)) for (x,) in inputs])
    assert (missing.abs() <= selected.abs().sum(dim=0) + 1e-12).all()


def _sent(x):
    return TopK(0.05).encode(x, None, Key(0))[0], Spec.of(x), Key(0)


def test_a_branch_that_drops_what_another_brings_back_loses_it(reduce) -> None:
    # k = 1. Ranks 0 and 1 keep position 0 and drop rank 1's 2 at position 1; ranks 2 and 3 agree
    # on position 1, which wins: rank 1 takes its 2 for heard, though nobody added it.
    rows = [[9.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 6.0, 0, 0], [0, 5.0, 0, 0]]
    results, _ = reduce(EF(GTopK(0.25)), [[torch.tensor(row)] for row in rows])
    assert results[0][0].mean.tolist() == [0, 11 / 4, 0, 0]
    assert results[0][0].state["residual"].tolist() == [9, 0, 0, 0]
    assert results[1][0].state["residual"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_saturate(reduce, dtype) -> None:
    x = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    results, _ = reduce(EF(GTopK(1.0)), [[x, x]] * 3)
    for result in results[0]:
        assert result.mean.dtype == dtype
        assert torch.isfinite(result.mean).all()


def test_the_shape_is_kept_and_empty_tensors_pass(reduce) -> None:
    results, _ = reduce(EF(GTopK(0.3)), [[torch.ones(2, 3, 5)]] * 2)
    assert results[0][0].mean.shape == results[0][0].own().shape == (2, 3, 5)
    results, _ = reduce(GTopK(0.3), [[torch.zeros(0)]] * 3)
    assert results[0][0].mean.shape == (0,)


def test_damaged_messages_are_refused() -> None:
    from gradwire.compression.sparsification.gtopk import _Tree

    tree = _Tree(TopK(0.1), Spec((NUMEL,), torch.float32))
    buffer = tree.select(torch.arange(float(NUMEL))).buffer
    damaged = buffer.clone()
    damaged[-1] ^= 1
    with pytest.raises(WireError):
        tree.merge(buffer, damaged)


def test_a_density_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="gtopk: density"):
        COMPRESSION.parse("gtopk(1.5)")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(reduce, bad) -> None:
    x = torch.ones(40, 40)
    x[3, 3] = bad
    with pytest.raises(NonFiniteError):
        reduce(GTopK(0.1), [[x]])
    with pytest.raises(NonFiniteError):
        reduce(EF(GTopK(0.1)), [[x]])
