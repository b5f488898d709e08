"""ECQ-SGD: the paper's rule, a trajectory by hand, and error feedback as a special case."""

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.lifted import lift

INPUTS = [
    [Key(4).at(step).private(rank).normal(60).double() for step in range(8)] for rank in range(3)
]


def test_a_trajectory_by_hand(reduce) -> None:
    """Top-1 of two elements; alpha 1/2, beta 3/4."""
    gradients = [[4.0, 2.0], [1.0, 1.0], [0.0, 4.0]]
    # t   h            g + h/2         sent        h' = 3/4 h + g - sent
    # 0   (0, 0)       (4, 2)          (4, 0)      (0, 2)
    # 1   (0, 2)       (1, 2)          (0, 2)      (1, 1/2)
    # 2   (1, 1/2)     (1/2, 17/4)     (0, 17/4)   (3/4, 1/8)
    inputs = [[torch.tensor(g, dtype=torch.float64) for g in gradients]]
    reducer = COMPRESSION.parse("ecq(topk(0.5), alpha=0.5, beta=0.75)")
    (steps,), _ = reduce(reducer, inputs)
    assert [step.mean.tolist() for step in steps] == [[4, 0], [0, 2], [0, 4.25]]
    held = [step.state["residual"].tolist() for step in steps]
    assert held == [[0, 2], [1, 0.5], [0.75, 0.125]]


@pytest.mark.parametrize("codec", ["qsgd(2)", "topk(0.1)", "topk(0.2) >> qsgd(bits=4)"])
def test_the_rule_of_the_paper(reduce, codec) -> None:
    """h_t = beta h_{t-1} + g_{t-1} - g~_{t-1}, from what was heard."""
    results, _ = reduce(COMPRESSION.parse(f"ecq({codec}, alpha=0.2, beta=0.9)"), INPUTS)
    for gradients, steps in zip(INPUTS, results):
        missing = torch.zeros(60, dtype=torch.float64)
        for gradient, step in zip(gradients, steps):
            missing = 0.9 * missing + gradient - step.own()
            assert torch.allclose(step.state["residual"], missing, rtol=0, atol=1e-13)


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("codec", ["qsgd(bits=8)", "topk(0.1)", "sign", "randomk(0.2)"])
def test_with_both_one_it_is_error_feedback(reduce, codec, route) -> None:
    architecture = AllReduce(route)
    ours, _ = reduce(
        COMPRESSION.parse(f"ecq({codec}, alpha=1.0, beta=1.0)"), INPUTS, architecture=architecture
    )
    other, _ = reduce(COMPRESSION.parse(f"ef({codec})"), INPUTS, architecture=architecture)
    for a, b in zip(ours, other):
        for x, y in zip(a, b):
            assert torch.equal(x.mean, y.mean)
            assert torch.equal(x.state["residual"], y.state["residual"])


def test_with_alpha_zero_nothing_is_fed_back(reduce) -> None:
    ours, _ = reduce(COMPRESSION.parse("ecq(topk(0.1), alpha=0.0, beta=0.5)"), INPUTS)
    other, _ = reduce(lift(COMPRESSION.parse("topk(0.1)")), INPUTS)
    assert all(torch.equal(x.mean, y.mean) for x, y in zip(ours[0], other[0]))


def test_it_stays_bounded_where_error_feedback_grows(reduce) -> None:
    """One level and one scale for all: omega is far above 1."""
    inputs = [[Key(9).at(step).normal(4096) for step in range(60)]]
    codec = 'qsgd(1, bucket=4096, norm="l2")'
    with pytest.warns(UserWarning, match="omega"):
        (plain,), _ = reduce(COMPRESSION.parse(f"ef({codec})"), inputs)
    (steps,), _ = reduce(COMPRESSION.parse(f"ecq({codec}, alpha=0.01, beta=0.9)"), inputs)
    size = float(inputs[0][0].norm())
    assert float(plain[-1].state["residual"].norm()) > 1e5 * size
    assert float(steps[-1].state["residual"].norm()) < 100 * size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ecq(sign, alpha=1.5, beta=1.0)", "alpha lies in 0 .. 1, got 1.5"),
        ("ecq(sign, alpha=0.5, beta=-1.0)", "beta lies in 0 .. 1, got -1.0"),
        ("ecq(ef(sign), alpha=0.5, beta=0.5)", "one is enough"),
        ("ecq(rans, alpha=0.5, beta=0.5)", "must follow a quantiser"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)
