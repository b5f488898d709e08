"""Batched forms give the results of one call after another, bit for bit."""

from functools import partial

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce._sums import divide_sum
from gradwire.architecture.gossip import _estimates, adpsgd, choco, d2, dcd, ecd, sgp
from gradwire.architecture.gossip._neighbours import weighted_sum
from gradwire.compression.feedback.velocity import Velocity, _update_velocity
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.batched import Elementwise, elementwise, form_of
from gradwire.core.group import mean_in_order
from gradwire.core.key import Key
from gradwire.core.rows import split_rows
from gradwire.synchronization import _rounds, localsgd
from gradwire.training import worker
from gradwire.training.backward import add_weight_decay
from gradwire.training.optimizer import SGD, Adam, clipped_update

N, D = 5, 37
VELOCITY = Velocity(TopK(0.1), momentum=0.9, nesterov=True)


def vectors(name: str) -> list[Tensor]:
    return [Key(3).private(rank).child(name).normal(D) for rank in range(N)]


A, B, C = vectors("a"), vectors("b"), vectors("c")
SHARED = Key(4).normal(D)
STEP = torch.tensor(3)
CASES = {
    "add": (torch.add, lambda i: (A[i], B[i])),
    "sub": (torch.sub, lambda i: (A[i], SHARED)),
    "mul": (torch.mul, lambda i: (A[i], 0.3)),
    "mean of mini-batches": (worker._mean_of, lambda i: (A[i], B[i], 3)),
    "weight decay": (add_weight_decay, lambda i: (A[i], SHARED, 1e-3)),
    "walk": (_rounds._walk, lambda i: (A[i], B[i])),
    "add walk": (localsgd._add_walk, lambda i: (SHARED, B[i])),
    "zeros": (localsgd._zeros, lambda i: ({"momentum": A[i]},)),
    "choco step": (choco._local_step, lambda i: (A[i], B[i], C[i])),
    "choco average": (choco._move_to_average, lambda i: (A[i], B[i], C[i], 0.3)),
    "change": (_estimates._apply_change, lambda i: (A[i], B[i], 0.5, 0.7)),
    "weighted sum": (
        weighted_sum,
        lambda i: (A[i], (A[(i + 1) % N], A[(i - 1) % N]), (0.3, 0.4)),
    ),
    "weighted sum of halves": (
        weighted_sum,
        lambda i: (A[i].half(), (A[(i + 1) % N].half(),), (0.3,)),
    ),
    "d2 message": (d2._message, lambda i: (A[i], B[i], C[i])),
    "d2 correction": (d2._correction, lambda i: (A[i], B[i], C[i])),
    "dcd": (dcd._change, lambda i: (A[i], B[i], C[i])),
    "ecd": (ecd._extrapolate, lambda i: (A[i], B[i], C[i], 4)),
    "adpsgd": (adpsgd._half_difference, lambda i: (A[i], B[i])),
    "sgp": (sgp._push_sum, lambda i: (A[i], 0.5, (B[i], C[i]), (0.2, 0.3), 1.2)),
    "divide": (divide_sum, lambda i: (A[i], 5)),
    "divide halves": (divide_sum, lambda i: (A[i].half(), 5)),
    "velocity": (_update_velocity, lambda i: (VELOCITY, A[i], B[i])),
    "first velocity": (_update_velocity, lambda i: (VELOCITY, A[i], None)),
    "sgd": (
        clipped_update,
        lambda i: (SGD(0.1), None, 0.05, A[i], B[i], {}, None),
    ),
    "momentum": (
        clipped_update,
        lambda i: (
            SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
            None,
            0.05,
            SHARED,
            B[i],
            {"momentum": C[i]},
            None,
        ),
    ),
    "adam": (
        clipped_update,
        lambda i: (
            Adam(),
            None,
            0.05,
            A[i],
            B[i],
            {"mean": C[i], "square": C[i].square(), "step": STEP},
            None,
        ),
    ),
}


def leaves(value) -> list:
    if isinstance(value, dict):
        return [leaf for name in sorted(value) for leaf in (name, *leaves(value[name]))]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_same(found, expected) -> None:
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one, other)
        else:
            assert one == other


def run_together(function, calls: list) -> list:
    form = form_of(function)
    assert form is not None
    keys = [form.keys(args) for args in calls]
    assert None not in keys
    assert len(set(keys)) == 1, "one kind of call"
    return form.run(calls)


@pytest.mark.parametrize("case", CASES)
def test_equals_one_after_another(case: str) -> None:
    function, arguments = CASES[case]
    calls = [arguments(i) for i in range(N)]
    expected = [function(*args) for args in calls]
    found = run_together(function, calls)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_rows_in_another_order_are_stacked_without_a_copy() -> None:
    seen = []

    @elementwise
    def double(x: Tensor) -> Tensor:
        seen.append(x)
        return 2 * x

    whole = torch.stack(A)
    rows = split_rows(whole)
    order = [3, 1, 0, 4, 2]
    found = run_together(double, [(rows[i],) for i in order])
    assert seen[0] is whole
    for i, one in zip(order, found):
        assert torch.equal(one, 2 * A[i])


def test_what_all_share_is_computed_once() -> None:
    found = run_together(torch.add, [(SHARED, SHARED)] * N)
    assert all(torch.equal(one, SHARED + SHARED) for one in found)


def test_calls_that_differ_in_more_than_vectors_are_apart() -> None:
    form = form_of(torch.mul)
    assert form is not None
    first, second = form.keys((A[0], 0.3)), form.keys((A[0], 0.4))
    assert first is not None
    assert second is not None
    assert first[0] == second[0], "they take as long"
    assert first[1] != second[1], "but are not done together"
    assert form.keys((A[0], 0.0))[0] != first[0]  # type: ignore[index]
    assert form.keys((A[0][:5], 0.3))[0] != first[0]  # type: ignore[index]


def test_some_calls_are_done_alone() -> None:
    form = form_of(clipped_update)
    assert form is not None
    state: dict[str, Tensor] = {}
    assert form.keys((SGD(0.1), 1.0, 0.05, A[0], B[0], state, None)) is None, "a norm"
    assert form.keys((SGD(0.1), None, 0.05, A[0], B[0], state, (A[0], {}))) is None, "own memory"
    long = torch.zeros(1 << 15)
    assert form.keys((SGD(0.1), None, 0.05, long, long, state, None)) is None, "long, on a CPU"


@pytest.mark.parametrize("lengths", [(6,) * 4, (7, 7, 6, 6)], ids=["even", "uneven"])
@pytest.mark.parametrize("views", [True, False])
def test_means_of_shards(lengths: tuple[int, ...], views: bool) -> None:
    whole = torch.stack([Key(5).private(rank).normal(sum(lengths)) for rank in range(N)])
    shards = [list(row.split(list(lengths))) for row in whole]
    if not views:
        shards = [[shard.clone() for shard in own] for own in shards]
    calls = [(tuple(own[j] for own in shards), N) for j in (2, 0, 3, 1)]
    form = form_of(mean_in_order)
    assert form is not None
    assert len({form.keys(args)[1] for args in calls}) == 1  # type: ignore[index]
    for one, args in zip(form.run(calls), calls, strict=True):
        assert torch.equal(one, mean_in_order(*args))


def test_partial_and_other_functions_have_no_form() -> None:
    assert form_of(partial(torch.add, A[0])) is None
    assert form_of(torch.div) is None


def test_results_lie_where_those_of_single_calls_do() -> None:
    """BLAS may add up in another order elsewhere."""
    form = Elementwise(torch.mul)
    for length in (1, 16, 1003):
        calls = [(torch.full((length,), float(i)), 2.0) for i in range(3)]
        results = form.run(calls)
        assert [result.data_ptr() % 64 for result in results] == [0, 0, 0]
        assert [result[-1].item() for result in results] == [0.0, 2.0, 4.0]
        again = form.run([(result, 0.5) for result in results])
        assert [result[0].item() for result in again] == [0.0, 1.0, 2.0]
