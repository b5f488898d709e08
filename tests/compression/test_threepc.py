"""3PC: the three-point inequality, silence that costs one byte, and EF21 as a special case."""

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.codec import Codec
from gradwire.core.coded import MeanOfReceived
from gradwire.core.errors import GradwireWarning, WireError
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

SIZE, NUMEL = 3, 50


def walk(scale: float, num_steps: int, numel: int = NUMEL) -> list[list[Tensor]]:
    """Gradients that change by `scale` times their size in every step."""
    inputs = []
    for rank in range(SIZE):
        x, own = Key(4).private(rank).normal(numel).double(), []
        for step in range(num_steps):
            own.append(x)
            x = x + scale * Key(5).at(step).private(rank).normal(numel).double()
        inputs.append(own)
    return inputs


@pytest.mark.parametrize("zeta", [0.0, 0.5, 2.0, 20.0])
@pytest.mark.parametrize("codec", ["topk(0.1)", "topk(0.5)", "sign", "identity"])
def test_the_three_point_inequality(reduce, codec, zeta) -> None:
    """|C_{h,y}(x) - x|^2 <= (1 - A) |h - y|^2 + B |x - y|^2 in every step, for several s."""
    inner = COMPRESSION.parse(codec)
    assert isinstance(inner, Codec)
    delta = inner.guarantee(Spec((NUMEL,), torch.float64)).delta
    assert delta is not None
    results, _ = reduce(COMPRESSION.parse(f"threepc({codec}, zeta={zeta})"), walk(0.3, 20))
    for gradients, steps in zip(walk(0.3, 20), results):
        for t in range(1, 20):
            h, y, x = steps[t - 1].own(), gradients[t - 1], gradients[t]
            error = float((steps[t].own() - x).square().sum())
            for s in (0.1 * delta, 0.5 * delta, 0.9 * delta):  # (1 - delta)(1 + s) < 1
                a = 1 - (1 - delta) * (1 + s)
                b = max((1 - delta) * (1 + 1 / s), zeta)
                bound = (1 - a) * (h - y).square().sum() + b * (x - y).square().sum()
                assert error <= float(bound) * (1 + 1e-9) + 1e-20


def test_a_trajectory_by_hand(reduce) -> None:
    """One element, nothing lost, zeta 1/4: speak if |x - h| > |x - y| / 2."""
    gradients = [4.0, 4.0, 5.0, 8.0, 20.0]
    # h:          0 -> 4, 4 (no news), 5 (1 > 1/2), 8 (3 > 3/2), 20
    inputs = [[torch.tensor([g], dtype=torch.float64) for g in gradients]]
    (steps,), _ = reduce(COMPRESSION.parse("threepc(identity, zeta=0.25)"), inputs)
    assert [float(step.mean) for step in steps] == [4, 4, 5, 8, 20]
    # zeta 1: x - h = x - y while h is the last gradient, which is no news; then it falls behind.
    inputs = [[torch.tensor([g], dtype=torch.float64) for g in (4.0, 5.0, 6.0, 6.0, 9.0, 9.5)]]
    (steps,), _ = reduce(COMPRESSION.parse("threepc(identity, zeta=1.0)"), inputs)
    assert [float(step.mean) for step in steps] == [4, 4, 6, 6, 6, 9.5]


@pytest.mark.parametrize("codec", ["topk(0.1)", "sign", "topk(0.2) >> qsgd(bits=4)"])
def test_without_laziness_it_is_ef21(reduce, codec) -> None:
    inputs = walk(0.3, 8)
    ours, a = reduce(COMPRESSION.parse(f"threepc({codec}, zeta=0.0)"), inputs)
    other, b = reduce(COMPRESSION.parse(f"ef21({codec})"), inputs)
    assert a.ledger.total_bytes == b.ledger.total_bytes
    for x, y in zip(ours[0], other[0]):
        assert torch.equal(x.mean, y.mean)
        assert torch.equal(x.own(), y.own())


def test_silence_costs_one_byte(reduce) -> None:
    inputs = [[x] * 5 for (x,) in walk(0.0, 1)]
    reducer = COMPRESSION.parse("threepc(identity, zeta=1.0)")
    _, first = reduce(reducer, [own[:1] for own in inputs])
    results, all_steps = reduce(reducer, inputs)
    silent = all_steps.ledger.total_bytes - first.ledger.total_bytes
    assert silent == 4 * SIZE * (SIZE - 1)
    exact = torch.stack([own[0] for own in inputs]).mean(0)
    assert torch.allclose(results[0][-1].mean, exact, rtol=0, atol=1e-14)


def test_what_all_hold_is_the_mean_of_what_each_is_known_by(reduce) -> None:
    for route in ("gather", "scatter"):
        results, _ = reduce(
            COMPRESSION.parse("threepc(topk(0.1), zeta=2.0)"),
            walk(0.3, 20),
            architecture=AllReduce(route),
        )
        for step in range(20):
            own = torch.stack([steps[step].own() for steps in results]).mean(0)
            assert torch.allclose(results[0][step].mean, own, rtol=0, atol=1e-13)


def test_lazy_descent_reaches_the_optimum_with_fewer_bytes() -> None:
    centres = Key(8).normal(SIZE * NUMEL).double().reshape(SIZE, NUMEL)

    def descend(text: str) -> tuple[float, int]:
        reducer = COMPRESSION.parse(text)

        async def program(node: Node) -> float:
            x = torch.zeros(NUMEL, dtype=torch.float64)
            state = reducer.init(Spec.of(x), node.size)
            for step in range(400):
                group, key = AllReduce().group(node, "x"), Key(2).at(step).private(node.rank)
                gradient = (1 + node.rank) * (x - centres[node.rank])
                reduced = await reducer.mean(gradient, state, key, group)
                state, x = reduced.state, x - 0.05 * reduced.mean
            weights = torch.arange(1, SIZE + 1)[:, None]
            return float((x - (weights * centres).sum(0) / weights.sum()).norm())

        engine = VirtualEngine(Network.uniform(SIZE))
        return engine.run([program] * SIZE)[0], engine.ledger.total_bytes

    eager, eager_bytes = descend("ef21(topk(0.2))")
    lazy, lazy_bytes = descend("threepc(topk(0.2), zeta=20.0)")
    assert eager < 1e-6
    assert lazy < 1e-6
    assert lazy_bytes < 0.8 * eager_bytes


def test_other_single_bytes_are_refused() -> None:
    codec, spec = COMPRESSION.parse("sign"), Spec((4,), torch.float32)
    assert isinstance(codec, Codec)
    payload, _ = codec.encode(torch.ones(4), codec.init(spec), Key(0).private(0))
    nothing = torch.zeros(1, dtype=torch.uint8)
    job = MeanOfReceived(codec, spec, Key(0), (0, 1))
    assert torch.equal(job.run((nothing, nothing), None)[0], nothing)  # nobody spoke
    heard, _ = job.run((payload.buffer, nothing), None)
    assert torch.equal(heard, torch.full((4,), 0.5))
    for wrong in (nothing + 1, torch.zeros(0, dtype=torch.uint8), payload.buffer[:-1]):
        with pytest.raises(WireError):
            job.run((nothing, wrong), None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threepc(sign, zeta=-1.0)", "zeta must be finite"),
        ("threepc(sign, zeta=1e999)", "zeta must be finite"),
        ("threepc(signvote, zeta=1.0)", "drift away"),
        ("threepc(adacomp(50), zeta=1.0)", "write ef"),
        ("threepc(terngrad(share=True), zeta=1.0)", "maximum over all workers"),
        ("threepc(rans, zeta=1.0)", "must follow a quantiser"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)


def test_feedback_around_it_is_refused(reduce) -> None:
    with pytest.raises(ValueError, match="feedback within feedback"):
        reduce(COMPRESSION.parse("ef(threepc(sign, zeta=1.0))"), [[torch.ones(4)]])


def test_a_codec_that_may_add_to_the_error_is_warned_about() -> None:
    with pytest.warns(GradwireWarning, match="omega = 15.3"):
        COMPRESSION.parse("threepc(terngrad(0.0), zeta=1.0)").init(Spec((1000,), torch.float32), 2)
