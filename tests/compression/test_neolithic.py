"""NEOLITHIC: every round takes its factor off the error, and costs its bytes."""

from itertools import pairwise

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.errors import GradwireWarning
from gradwire.core.key import Key
from gradwire.core.spec import Spec

X = Key(12).normal(400).double()


@pytest.mark.few
@pytest.mark.parametrize("codec", ["topk(0.1)", "sign", "randomk(0.2)", "topk(0.4) >> topk(0.25)"])
def test_the_error_falls_geometrically_with_rounds(reduce, codec) -> None:
    """E|x - v_R|^2 <= (1 - delta)^R |x|^2, over 20 draws."""
    inner = COMPRESSION.parse(codec)
    assert isinstance(inner, Codec)
    delta = inner.guarantee(Spec.of(X)).delta
    assert delta is not None
    ratios = []
    for rounds in range(1, 9):
        (steps,), _ = reduce(COMPRESSION.parse(f"neolithic({codec}, rounds={rounds})"), [[X] * 20])
        errors = torch.stack([(X - step.mean).square().sum() for step in steps])
        ratios.append(float(errors.mean() / X.square().sum()))
        slack = 1.1 if "randomk" in codec else 1 + 1e-12  # an expectation there
        assert ratios[-1] <= (1 - delta) ** rounds * slack
    assert all(later < earlier for earlier, later in pairwise(ratios))
    if codec == "randomk(0.2)":
        assert ratios[-1] == pytest.approx(0.8**8, rel=0.1)  # met with equality


def test_an_unbiased_codec_leaves_powers_of_omega(reduce) -> None:
    inner = COMPRESSION.parse("qsgd(bits=8)")
    assert isinstance(inner, Codec)
    omega = inner.guarantee(Spec.of(X)).omega
    assert omega is not None
    assert omega < 1
    (steps,), _ = reduce(COMPRESSION.parse("neolithic(qsgd(bits=8), rounds=3)"), [[X]])
    assert float((X - steps[0].mean).square().sum() / X.square().sum()) <= omega**3


def test_rounds_of_top_k_are_one_top_k_of_all(reduce) -> None:
    (many,), _ = reduce(COMPRESSION.parse("neolithic(topk(0.05), rounds=4)"), [[X]])
    (one,), _ = reduce(COMPRESSION.parse("neolithic(topk(0.2), rounds=1)"), [[X]])
    assert torch.equal(many[0].mean, one[0].mean)


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("codec", ["topk(0.1)", "sign", "randomk(0.2)"])
def test_bytes_grow_with_rounds(reduce, codec, route) -> None:
    inputs = [[Key(1).private(rank).normal(400)] for rank in range(3)]
    sent = []
    for rounds in (1, 2, 5):
        reducer = COMPRESSION.parse(f"neolithic({codec}, rounds={rounds})")
        _, engine = reduce(reducer, inputs, architecture=AllReduce(route))
        sent.append(engine.ledger.total_bytes)
    # Indices compress to a few bytes more or less.
    assert sent[1] == pytest.approx(2 * sent[0], rel=0.05)
    assert sent[2] == pytest.approx(5 * sent[0], rel=0.05)


def test_one_round_is_the_codec_alone(reduce) -> None:
    inputs = [[Key(1).at(step).private(rank).normal(60) for step in range(3)] for rank in range(3)]
    ours, a = reduce(COMPRESSION.parse("ef(neolithic(topk(0.1), rounds=1))"), inputs)
    other, b = reduce(COMPRESSION.parse("ef(topk(0.1))"), inputs)
    assert a.ledger.total_bytes == b.ledger.total_bytes
    assert all(torch.equal(x.mean, y.mean) for x, y in zip(ours[0], other[0]))


@pytest.mark.parametrize("codec", ["topk(0.1)", "sign", "randomk(0.2)"])
def test_with_feedback_nothing_is_lost(reduce, codec) -> None:
    inputs = [
        [Key(1).at(step).private(rank).normal(60).double() for step in range(6)]
        for rank in range(3)
    ]
    reducer = COMPRESSION.parse(f"ef(neolithic({codec}, rounds=3))")
    results, _ = reduce(reducer, inputs)
    applied = sum(step.mean for step in results[0]) * 3
    held = sum(steps[-1].state["residual"] for steps in results)
    everything = sum(x for own in inputs for x in own)
    assert torch.allclose(applied + held, everything, rtol=0, atol=1e-12)


def test_the_way_back_is_compressed_in_rounds_too(reduce) -> None:
    inputs = [[Key(1).private(rank).normal(400).double()] for rank in range(3)]
    exact = torch.stack([own[0] for own in inputs]).mean(0)
    errors = []
    for rounds in (1, 4, 12):
        reducer = COMPRESSION.parse(f"neolithic(sign, rounds={rounds})")
        results, _ = reduce(reducer, inputs, architecture=AllReduce("scatter"))
        errors.append(float((results[0][0].mean - exact).norm() / exact.norm()))
    assert errors[1] < 0.7 * errors[0]
    assert errors[2] < 0.5 * errors[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("neolithic(sign, rounds=0)", "rounds must be at least 1, got 0"),
        ("neolithic(ef(sign), rounds=2)", "one is enough"),
        ("neolithic(adacomp(50), rounds=2)", "write ef"),
        ("neolithic(rans, rounds=2)", "must follow a quantiser"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


def test_a_codec_that_may_add_to_the_error_is_warned_about() -> None:
    with pytest.warns(GradwireWarning, match="omega = 15.3"):
        COMPRESSION.parse("neolithic(terngrad(0.0), rounds=2)").init(
            Spec((1000,), torch.float32), 2
        )
