"""DIANA: the exact optimum where workers differ and quantisation alone leaves noise."""

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

SIZE, NUMEL = 4, 40
# f_i(x) = sum of curvature_i (x - centre_i)^2 / 2: every worker has an optimum of its own.
CURVATURES = 1 + Key(6).uniform(SIZE * NUMEL).double().reshape(SIZE, NUMEL)
CENTRES = Key(7).normal(SIZE * NUMEL).double().reshape(SIZE, NUMEL)
OPTIMUM = (CURVATURES * CENTRES).sum(0) / CURVATURES.sum(0)


def distances(text: str, rate: float, num_steps: int) -> list[float]:
    """From the optimum, before every step of gradient descent."""
    reducer, start = lift(COMPRESSION.parse(text)), torch.zeros(NUMEL, dtype=torch.float64)

    async def program(node: Node) -> list[float]:
        x, state, seen = start, reducer.init(Spec.of(start), node.size), []
        for step in range(num_steps):
            group, key = AllReduce().group(node, "x"), Key(2).at(step).private(node.rank)
            seen.append(float((x - OPTIMUM).norm()))
            gradient: Tensor = CURVATURES[node.rank] * (x - CENTRES[node.rank])
            reduced = await reducer.mean(gradient, state, key, group)
            state, x = reduced.state, x - rate * reduced.mean
        return seen

    return VirtualEngine(Network.uniform(SIZE)).run([program] * SIZE)[0]


@pytest.mark.few
@pytest.mark.parametrize("codec", ["qsgd(2)", "randomk(0.25, unbiased=True, shared=False)"])
def test_it_reaches_the_optimum_where_its_codec_alone_stalls(codec) -> None:
    alone = distances(codec, 0.15, 300)
    diana = distances(f"diana({codec})", 0.15, 300)
    assert min(alone[-50:]) > 1e-2
    assert max(diana[-50:]) < 1e-6


def test_the_rate_of_learning_follows_from_the_codec(reduce) -> None:
    spec = Spec((64,), torch.float32)
    codec = COMPRESSION.parse("qsgd(2)")
    assert isinstance(codec, Codec)
    omega = codec.guarantee(spec).omega
    assert omega is not None
    assert _learned("diana(qsgd(2))", reduce) == pytest.approx(1 / (1 + omega))
    assert _learned("diana(qsgd(2), alpha=0.3)", reduce) == pytest.approx(0.3)


def test_it_follows_a_codec_that_changes_with_time(reduce) -> None:
    """With 8 bits in the first step, 1 in the second: the shift learns that much less."""
    text = "diana(qsgd(bits=ramp(8, 2, steps=1)))"
    first, second = (COMPRESSION.parse(f"diana(qsgd(bits={bits}))") for bits in (8, 2))
    spec = Spec((64,), torch.float64)
    x = Key(4).normal(64).double()
    (steps,), _ = reduce(lift(COMPRESSION.parse(text)), [[x, x]])
    moved = steps[1].state["own"] - steps[0].state["own"]
    heard = steps[1].mean - steps[0].state["own"]  # what the second message said
    torch.testing.assert_close(moved, second._alpha(spec) * heard)
    assert second._alpha(spec) < first._alpha(spec)


def _learned(text: str, reduce) -> float:
    """The share of the first message that goes into the shift."""
    x = Key(4).normal(64)
    (steps,), _ = reduce(COMPRESSION.parse(text), [[x]])
    heard, own = steps[0].mean, steps[0].state["own"]
    return float((own @ heard) / (heard @ heard))


def test_a_trajectory_by_hand(reduce) -> None:
    """Two workers, nothing lost, alpha 1/2: shifts go half the way, the mean is exact."""
    gradients = [[4.0, 4.0, 8.0], [0.0, 2.0, 2.0]]
    inputs = [[torch.tensor([g], dtype=torch.float64) for g in own] for own in gradients]
    results, _ = reduce(COMPRESSION.parse("diana(identity, alpha=0.5)"), inputs)
    assert [float(step.mean) for step in results[0]] == [2, 3, 5]
    assert [float(step.state["own"]) for step in results[0]] == [2, 3, 5.5]
    assert [float(step.state["own"]) for step in results[1]] == [0, 1, 1.5]
    assert [float(step.state["common"]) for step in results[0]] == [1, 2, 3.5]


def test_the_common_shift_is_the_mean_of_all(reduce) -> None:
    inputs = [
        [Key(3).at(step).private(rank).normal(60_000).double() for step in range(3)]
        for rank in range(3)
    ]
    for route in ("auto", "gather", "scatter"):
        results, _ = reduce(
            COMPRESSION.parse("diana(qsgd(bits=4))"), inputs, architecture=AllReduce(route)
        )
        own = torch.stack([steps[-1].state["own"] for steps in results])
        assert torch.allclose(results[0][-1].state["common"], own.mean(0), rtol=0, atol=1e-14)
        heard = torch.stack([steps[-1].own() for steps in results])
        assert torch.allclose(results[0][-1].mean, heard.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("text", ["diana(topk(0.1))", "diana(topk(0.1), alpha=0.5)"])
def test_a_biased_codec_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"biased.*ef21\(topk"):
        COMPRESSION.parse(text).init(Spec((100,), torch.float32), 2)


def test_a_codec_that_states_no_variance_needs_alpha() -> None:
    text = 'partition({"*": "qsgd(2)"})'
    with pytest.raises(ValueError, match=r"alpha=0\.1"):
        COMPRESSION.parse(f"diana({text})").init(Spec((9,), torch.float32), 2)
    COMPRESSION.parse(f"diana({text}, alpha=0.1)").init(Spec((9,), torch.float32), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diana(qsgd(2), alpha=0.0)", "alpha lies in"),
        ("diana(qsgd(2), alpha=1.5)", "alpha lies in"),
        ("diana(ef(sign))", "one is enough"),
        ("diana(signvote)", "drift away"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


def test_momentum_may_come_after_it() -> None:
    assert COMPRESSION.parse("diana(qsgd(bits=4))").momentum_lives == "after"
