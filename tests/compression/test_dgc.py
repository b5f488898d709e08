"""Deep gradient compression: momentum SGD as a special case, trajectories by hand, clipping."""

import pytest
import torch

from gradwire import kernels
from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.errors import NonFiniteError
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.ramp import at
from gradwire.training.optimizer import SGD

# Whole numbers and a momentum of 1/2: in float64 nothing is rounded, in whatever order.
INPUTS = [
    [(8 * Key(4).at(step).private(rank).normal(60)).round().double() for step in range(12)]
    for rank in range(2)
]
ROUTE = pytest.mark.parametrize("route", ["gather", "scatter"])
# One that selects and moves in one pass, one that does not, and one that sends all.
WHOLE = pytest.mark.parametrize("inner", ["1.0", "topk(1.0)", "aji(1.0)", "identity"])


def trained(reduce, text: str, optimizer: SGD, route: str = "gather") -> torch.Tensor:
    (steps, _), _ = reduce(COMPRESSION.parse(text), INPUTS, architecture=AllReduce(route))
    return descended(optimizer, [step.mean for step in steps])


def descended(optimizer: SGD, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Parameters after each step. [steps, d]"""
    params = torch.zeros(60, dtype=torch.float64)
    state, path = optimizer.init(params), []
    for gradient in gradients:
        params, state = optimizer.update(params, gradient, state, optimizer.lr)
        path.append(params)
    return torch.stack(path)


def means() -> list[torch.Tensor]:
    return [(a + b) / 2 for a, b in zip(*INPUTS)]


@ROUTE
@WHOLE
def test_all_sent_and_nothing_masked_is_momentum_sgd(reduce, inner, route) -> None:
    ours = trained(reduce, f"dgc({inner}, momentum=0.5, masking=False)", SGD(0.5), route)
    assert torch.equal(ours, descended(SGD(0.5, momentum=0.5), means()))


@WHOLE
def test_all_sent_with_nesterov_is_nesterovs(reduce, inner) -> None:
    text = f"dgc({inner}, momentum=0.5, masking=False, nesterov=True)"
    expected = descended(SGD(0.5, momentum=0.5, nesterov=True), means())
    assert torch.equal(trained(reduce, text, SGD(0.5)), expected)


@ROUTE
@WHOLE
def test_all_sent_and_masked_is_plain_sgd(reduce, inner, route) -> None:
    ours = trained(reduce, f"dgc({inner}, momentum=0.5, masking=True)", SGD(0.5), route)
    assert torch.equal(ours, descended(SGD(0.5), means()))


@pytest.mark.parametrize("codec", ["topk(0.5)", "0.5", "aji(0.5)", "topk(0.5) >> identity"])
def test_a_trajectory_by_hand(reduce, codec) -> None:
    """One element of two, momentum 1/2."""
    gradients = [[4.0, 2.0], [0.0, 2.0], [1.0, 0.5], [2.0, 0.0]]
    # t   u = u/2 + g    v = v + u     sent        u masked     v
    # 0   (4, 2)         (4, 2)        (4, 0)      (0, 2)       (0, 2)
    # 1   (0, 3)         (0, 5)        (0, 5)      (0, 0)       (0, 0)
    # 2   (1, 1/2)       (1, 1/2)      (1, 0)      (0, 1/2)     (0, 1/2)
    # 3   (2, 1/4)       (2, 3/4)      (2, 0)      (0, 1/4)     (0, 3/4)
    inputs = [[torch.tensor(g, dtype=torch.float64) for g in gradients]]
    (steps,), _ = reduce(COMPRESSION.parse(f"dgc({codec}, momentum=0.5)"), inputs)
    assert [step.mean.tolist() for step in steps] == [[4, 0], [0, 5], [1, 0], [2, 0]]
    assert [s.state["velocity"].tolist() for s in steps] == [[0, 2], [0, 0], [0, 0.5], [0, 0.25]]
    assert [s.state["residual"].tolist() for s in steps] == [[0, 2], [0, 0], [0, 0.5], [0, 0.75]]


def test_the_same_without_masking(reduce) -> None:
    gradients = [[4.0, 2.0], [0.0, 2.0], [1.0, 1.0]]
    # t   u = u/2 + g    v = v + u     sent        v
    # 0   (4, 2)         (4, 2)        (4, 0)      (0, 2)
    # 1   (2, 3)         (2, 5)        (0, 5)      (2, 0)
    # 2   (2, 5/2)       (4, 5/2)      (4, 0)      (0, 5/2)
    inputs = [[torch.tensor(g, dtype=torch.float64) for g in gradients]]
    (steps,), _ = reduce(COMPRESSION.parse("dgc(topk(0.5), momentum=0.5, masking=False)"), inputs)
    assert [step.mean.tolist() for step in steps] == [[4, 0], [0, 5], [4, 0]]
    assert [s.state["velocity"].tolist() for s in steps] == [[4, 2], [2, 3], [2, 2.5]]
    assert [s.state["residual"].tolist() for s in steps] == [[0, 2], [2, 0], [0, 2.5]]


@pytest.mark.few(2)
@ROUTE
@pytest.mark.parametrize(
    "codec", ["sign", "topk(0.1)", "topk(0.2) >> qsgd(bits=4)", "sampledk(0.1)"]
)
def test_without_momentum_it_is_error_feedback(reduce, codec, route) -> None:
    architecture = AllReduce(route)
    ours, other = (
        reduce(COMPRESSION.parse(text), INPUTS, architecture=architecture)[0]
        for text in (f"dgc({codec}, momentum=0.0)", f"ef({codec})")
    )
    for a, b in zip(ours, other):
        for x, y in zip(a, b):
            assert torch.equal(x.mean, y.mean)
            assert torch.equal(x.state["residual"], y.state["residual"])


@pytest.mark.parametrize("inner", ["1.0", "identity", "sign"])
@pytest.mark.parametrize("size", [1, 4])
def test_every_worker_clips_to_its_share_of_the_norm(reduce, inner, size) -> None:
    """Norm 5 is above clip / sqrt(n), norm 1/4 below it."""
    long, short = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    long[:2], short[2] = torch.tensor([3.0, -4.0]), 0.25
    clip = 2.5 / size**0.5
    reducer = COMPRESSION.parse(f"dgc({inner}, momentum=0.0, clip={clip})")
    results, _ = reduce(reducer, [[long, short]] * size)
    for steps in results:
        assert torch.equal(steps[0].state["velocity"], long / 2) or reducer.masks
        assert torch.equal(steps[1].state["velocity"], short) or reducer.masks
        if inner != "sign":
            assert torch.equal(steps[0].mean, long / 2)
            assert torch.equal(steps[1].mean, short)


def test_gradients_of_one_norm_add_up_to_no_more_than_it(reduce) -> None:
    """N independent gradients of norm clip * sqrt(N) have a mean of about norm clip."""
    inputs = [[Key(2).private(rank).normal(10_000)] for rank in range(4)]
    results, _ = reduce(COMPRESSION.parse("dgc(1.0, momentum=0.0, clip=1.0)"), inputs)
    assert float(results[0][0].mean.norm()) == pytest.approx(1.0, abs=0.05)


def test_warm_up_is_a_ramp_of_the_density() -> None:
    reducer = COMPRESSION.parse("dgc(0.001, warmup=4)")
    assert reducer == COMPRESSION.parse("dgc(ramp(0.25, 0.001, epochs=4, hold=1))")
    per_epoch = 10
    densities = [at(reducer, step, per_epoch).compression.density for step in range(6 * per_epoch)]
    for epoch, density in enumerate([0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]):
        ours = densities[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert len(set(ours)) == 1
        assert ours[0] == pytest.approx(density, rel=0.02)


def test_warm_up_sends_more_in_the_first_epochs(reduce) -> None:
    inputs = [[Key(5).at(step).normal(10_000) for step in range(6)]]
    (steps,), _ = reduce(lift(COMPRESSION.parse("dgc(0.001, warmup=4)"), 1.0), inputs)
    counts = [int(step.mean.count_nonzero()) for step in steps]
    assert counts[0] == pytest.approx(2500, rel=0.2)
    assert counts[4:] == pytest.approx([10, 10], rel=0.5)
    assert sorted(counts[:5], reverse=True) == counts[:5]
    plain, _ = reduce(
        lift(COMPRESSION.parse("dgc(sampledk(ramp(0.25, 0.001, epochs=4, hold=1)))"), 1.0), inputs
    )
    assert all(torch.equal(x.mean, y.mean) for x, y in zip(steps, plain[0]))


@pytest.mark.parametrize(
    "text",
    [
        "dgc(0.01)",
        "dgc(0.01, masking=False, clip=1.0)",
        "dgc(topk(0.01), nesterov=True)",
        "dgc(topk(0.05) >> qsgd(bits=4))",
        "dgc(sampledk(0.3) >> fp16, momentum=0.5)",
    ],
)
@pytest.mark.parametrize("size", [1, 3])
def test_one_pass_in_c_gives_the_bits_of_torch(reduce, text, size, monkeypatch) -> None:
    inputs = [
        [Key(6).at(step).private(rank).normal(3001) for step in range(4)] for rank in range(size)
    ]
    both = []
    for backend in ("native", "reference"):
        if backend == "reference":
            monkeypatch.setenv("GRADWIRE_KERNELS", "reference")
        elif kernels.backend() != "native":
            pytest.skip("needs the native kernels")
        both.append(reduce(COMPRESSION.parse(text), inputs)[0])
    for a, b in zip(*both):
        for x, y in zip(a, b):
            assert torch.equal(x.mean, y.mean)
            for name in ("residual", "velocity"):
                assert torch.equal(x.state[name], y.state[name])


def test_other_sparsifiers_mask_what_was_heard(reduce) -> None:
    """randomk keeps shared positions, the rules of a partition their own tensors."""
    inputs = [[Key(7).at(step).normal(90) for step in range(3)]]
    for text in (
        "dgc(randomk(0.1))",
        "dgc(gtopk(0.1))",
        "dgc(layerwise(topk(0.1)))",
        'dgc(partition({"*": aji(0.2)}))',
    ):
        reducer = COMPRESSION.parse(text)
        assert reducer.masks
        (steps,), _ = reduce(reducer, inputs)
        for step in steps:
            sent = step.own() != 0
            assert sent.any()
            assert not step.state["velocity"][sent].any()
            assert step.state["velocity"][~sent].all()
    assert COMPRESSION.parse("dgc(layerwise(topk(0.1) >> qsgd(bits=4)))").masks
    assert not COMPRESSION.parse("dgc(sign)").masks
    assert not COMPRESSION.parse("dgc(layerwise(sign))").masks
    assert not COMPRESSION.parse('dgc(partition({"a": fp16, "*": topk(0.1)}))').masks


@pytest.mark.parametrize("inner", ["topk(0.1)", "sampledk(0.1)", "sign", "aji(0.1)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_not_finite_is_refused(reduce, inner, dtype) -> None:
    x = torch.ones(100, dtype=dtype)
    x[3] = torch.inf
    with pytest.raises(NonFiniteError):
        reduce(COMPRESSION.parse(f"dgc({inner})"), [[x]])
    with pytest.raises(NonFiniteError):
        reduce(COMPRESSION.parse(f"dgc({inner}, clip=1.0)"), [[x]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgc(1.5)", "density is the fraction kept"),
        ("dgc(0.1, momentum=1.0)", "momentum lies in 0 .. 1, without 1, got 1.0"),
        ("dgc(0.1, clip=0.0)", "clip is the norm"),
        ("dgc(sign, masking=True)", "sends something of every element"),
        ("dgc(topk(0.1), warmup=4)", r"topk\(ramp\(0.25, 0.001, epochs=4, hold=1\)\)"),
        ("dgc(0.3, warmup=4)", "a density below 0.25"),
        ("dgc(0.1, warmup=-1)", "epochs above 0"),
        ("dgc(ef(sign))", "one is enough"),
        ("dgc(rans)", "must follow a quantiser"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESSION.parse(text)
