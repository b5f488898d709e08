"""Global momentum compression: momentum SGD as a special case, and a trajectory by hand."""

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.training.optimizer import SGD

# Whole numbers and a momentum of 1/2: in float64 nothing is rounded, in whatever order.
INPUTS = [
    [(8 * Key(4).at(step).private(rank).normal(60)).round().double() for step in range(12)]
    for rank in range(2)
]


def descended(optimizer: SGD, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Parameters after each step. [steps, d]"""
    params = torch.zeros(60, dtype=torch.float64)
    state, path = optimizer.init(params), []
    for gradient in gradients:
        params, state = optimizer.update(params, gradient, state, optimizer.lr)
        path.append(params)
    return torch.stack(path)


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("inner", ["topk(1.0)", "identity"])
def test_all_sent_is_momentum_sgd(reduce, inner, route) -> None:
    reducer = COMPRESSION.parse(f"gmc({inner}, momentum=0.5)")
    (steps, _), _ = reduce(reducer, INPUTS, architecture=AllReduce(route))
    ours = descended(SGD(0.5), [step.mean for step in steps])
    means = [(a + b) / 2 for a, b in zip(*INPUTS)]
    assert torch.equal(ours, descended(SGD(0.5, momentum=0.5), means))


def test_a_trajectory_by_hand(reduce) -> None:
    """Two workers send one element of two; momentum 1/2."""
    gradients = [[[4.0, 2.0], [0.0, 2.0], [1.0, 0.0]], [[1.0, 2.0], [3.0, 0.0], [0.0, 2.0]]]
    # t   d            worker 0: p, sent, e              worker 1: p, sent, e
    # 0   (0, 0)       (4, 2)     (4, 0)  (0, 2)         (1, 2)    (0, 2)  (1, 0)
    # 1   (2, 1)       (1, 9/2)   (0, 9/2) (1, 0)        (5, 1/2)  (5, 0)  (0, 1/2)
    # 2   (5/2, 9/4)   (13/4, 9/8) (13/4, 0) (0, 9/8)    (5/4, 29/8) (0, 29/8) (5/4, 0)
    inputs = [[torch.tensor(g, dtype=torch.float64) for g in own] for own in gradients]
    results, _ = reduce(COMPRESSION.parse("gmc(topk(0.5), momentum=0.5)"), inputs)
    assert [s.mean.tolist() for s in results[0]] == [[2, 1], [2.5, 2.25], [1.625, 1.8125]]
    held = [[step.state["residual"].tolist() for step in steps] for steps in results]
    assert held == [[[0, 2], [1, 0], [0, 1.125]], [[1, 0], [0, 0.5], [1.25, 0]]]
    for steps in results:
        assert all(torch.equal(step.state["last"], step.mean) for step in steps)


@pytest.mark.parametrize("codec", ["sign", "topk(0.1)", "topk(0.2) >> qsgd(bits=4)"])
def test_without_momentum_it_is_error_feedback(reduce, codec) -> None:
    ours, _ = reduce(COMPRESSION.parse(f"gmc({codec}, momentum=0.0)"), INPUTS)
    other, _ = reduce(COMPRESSION.parse(f"ef({codec})"), INPUTS)
    for x, y in zip(ours[0], other[0]):
        assert torch.equal(x.mean, y.mean)
        assert torch.equal(x.state["residual"], y.state["residual"])


@pytest.mark.parametrize("codec", ["sign", "topk(0.1)", "randomk(0.2)"])
def test_gradients_and_momentum_are_all_applied_or_held(reduce, codec) -> None:
    """Sum of means = sum over steps of (mean gradient + m d) - mean residual."""
    results, _ = reduce(COMPRESSION.parse(f"gmc({codec}, momentum=0.9)"), INPUTS)
    applied = [step.mean for step in results[0]]
    given = sum(sum(own) for own in INPUTS) / 2 + 0.9 * sum(applied[:-1])
    held = sum(steps[-1].state["residual"] for steps in results) / 2
    assert torch.allclose(sum(applied) + held, given, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gmc(sign, momentum=1.0)", "momentum lies in 0 .. 1, without 1, got 1.0"),
        ("gmc(ef(sign))", "one is enough"),
        ("gmc(rans)", "must follow a quantiser"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)
