"""Where momentum lives: on the mean, before compression, or inside a method of its own."""

import warnings

import pytest
import torch

from gradwire import resume, simulate
from gradwire.compression import COMPRESSION
from gradwire.core.errors import GradwireWarning
from gradwire.core.lifted import lift
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.momentum import place
from gradwire.experiment.run.setup import prepare
from gradwire.synchronization.bsp import BSP
from gradwire.synchronization.localsgd import LocalSGD
from gradwire.training.optimizer import SGD, Adam

MOMENTUM = SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
SMALL = {"workers": 2, "threads": 1, "compute": "fixed(0.01)"}
SHORT = {**SMALL, "epochs": 1.0}


def parse(text: str):
    return COMPRESSION.parse(text)


def test_feedback_gets_it_before_compression() -> None:
    placed = place(MOMENTUM, parse("ef(topk(0.01))"), BSP(), "auto")
    assert repr(placed.compression) == "velocity(ef(topk(0.01)), nesterov=True)"
    assert placed.optimizer == SGD(0.1)
    assert placed.local_decay == 1e-3
    assert placed.where == "before"


@pytest.mark.parametrize("text", ["identity", "qsgd(bits=4)", "powersgd(2)"])
def test_without_feedback_it_stays_with_the_optimizer(text) -> None:
    placed = place(MOMENTUM, parse(text), BSP(), "auto")
    assert (placed.optimizer, placed.compression) == (MOMENTUM, parse(text))
    assert placed.where == "after"


def test_after_feedback_is_warned_about_with_the_reason() -> None:
    with pytest.warns(GradwireWarning, match=r"68\.0%.*83\.8%.*88\.6%"):
        placed = place(MOMENTUM, parse("ef(topk(0.001))"), BSP(), "after")
    assert placed.optimizer == MOMENTUM


def test_local_steps_keep_their_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = place(MOMENTUM, parse("ef(topk(0.001))"), LocalSGD(4), "after")
    assert placed.optimizer == MOMENTUM


def test_local_steps_are_no_gradients() -> None:
    with pytest.raises(ValueError, match="steps already taken"):
        place(SGD(0.1), parse("velocity(ef(topk(0.01)))"), LocalSGD(4), "auto")


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.5), Adam(0.001)])
def test_two_momenta_are_refused(optimizer) -> None:
    with pytest.raises(ValueError, match=r"momentum of its own.*Write sgd\("):
        place(optimizer, parse("velocity(ef(topk(0.01)))"), BSP(), "auto")


def test_the_same_momentum_named_twice_is_one() -> None:
    compression = parse("velocity(ef(topk(0.01)), momentum=0.9, nesterov=True)")
    placed = place(MOMENTUM, compression, BSP(), "auto")
    assert (placed.optimizer, placed.compression) == (SGD(0.1), compression)
    assert placed.local_decay == 1e-3


def test_before_and_after_are_the_same_without_compression() -> None:
    """The mean of velocities is the velocity of means, weight decay and Nesterov included."""
    runs = [
        simulate(optimizer=repr(MOMENTUM), momentum_at=where, **SHORT)
        for where in ("before", "after")
    ]
    assert [run.config.momentum_at for run in runs] == ["before", "after"]
    torch.testing.assert_close(runs[0].params, runs[1].params, rtol=0, atol=2e-5)


@pytest.mark.few
@pytest.mark.parametrize("text", ["ef(topk(0.05))", "dgc(0.05, warmup=1)"])
def test_an_interrupted_run_goes_on_where_it_was(text, tmp_path) -> None:
    settings = {**SHORT, "eval_every": 5, "optimizer": "sgd(0.05, momentum=0.9, weight_decay=0.01)"}
    whole = simulate(compression=text, **settings)
    assert whole.config.momentum_at == "before"

    def interrupt(row, steps):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(compression=text, out=tmp_path / "cut", progress=interrupt, **settings)
    assert torch.equal(resume(tmp_path / "cut").params, whole.params)


def test_clipping_comes_before_the_momentum() -> None:
    """Lin et al. 2018, sec. 3.2: as if n gradients were independent."""
    settings = {**SMALL, "steps": 1, "compression": "velocity(identity)", "optimizer": "sgd(1.0)"}

    def moved(**changes) -> float:
        start = simulate(**{**settings, **changes, "optimizer": "sgd(0.0)"}).params
        return float((simulate(clip_norm=0.01, **{**settings, **changes}).params - start).norm())

    assert moved(workers=1) == pytest.approx(0.01, rel=1e-3)
    # Two gradients of norm 0.01 sqrt(2) that are not opposed: their mean is no shorter than 0.01.
    assert 0.01 < moved(workers=2) < 0.01 * 2**0.5


def test_clipping_and_decay_come_in_the_order_of_the_optimizer() -> None:
    optimizer = "sgd(0.1, momentum=0.9, weight_decay=ramp(0.05, 0.001, steps=5))"
    before, after = (
        simulate(
            optimizer=optimizer, momentum_at=where, clip_norm=0.5, **{**SHORT, "workers": 1}
        ).params
        for where in ("before", "after")
    )
    torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "lives"),
    [
        ('partition({"bias": "fp16", "*": "ef(topk(0.01))"})', "before"),
        ('partition({"bias": "velocity(fp16)", "*": "dgc(0.01)"})', "inside"),
        ('partition({"bias": "fp16", "*": "topk(0.01)"})', "after"),
        ("neolithic(sign, rounds=2)", "after"),
        ("ef21(sign, momentum=0.9)", "inside"),
        ("diana(qsgd(bits=4))", "after"),
    ],
)
def test_a_compression_of_several_says_where_it_lives(text, lives) -> None:
    assert lift(parse(text)).momentum_lives == lives


@pytest.mark.parametrize(
    "text",
    ['partition({"bias": "fp16", "*": "dgc(0.01)"})', 'partition({"*": "dgc(0.01)"}, min_size=9)'],
)
def test_no_tensor_is_left_without_momentum(text) -> None:
    with pytest.raises(ValueError, match="left without"):
        parse(text)


@pytest.mark.parametrize(
    ("compression", "optimizer", "synchronization", "where"),
    [
        ("dgc(0.01)", SGD(0.1), BSP(), "after"),
        ("ef(sign)", Adam(0.001), BSP(), "before"),
        ("ef(sign)", MOMENTUM, LocalSGD(4), "before"),
    ],
)
def test_a_place_that_cannot_be_is_refused(compression, optimizer, synchronization, where) -> None:
    with pytest.raises(ValueError, match=f'momentum_at="{where}"'):
        place(optimizer, parse(compression), synchronization, where)


def test_any_hyper_parameter_may_change_with_time() -> None:
    """The optimizer's too: a ramp of one step is a schedule that changes after one."""
    settings = {**SMALL, "steps": 4}
    ramp = simulate(optimizer="sgd(ramp(0.2, 0.02, steps=1))", **settings)
    step = simulate(optimizer="sgd(0.2)", schedule="step((1,))", **settings)
    torch.testing.assert_close(ramp.params, step.params, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_momentum_may_begin_at_zero() -> None:
    """Then the first velocity is the gradient, wherever it is kept."""
    optimizer = "sgd(0.1, momentum=ramp(0, 0.9, steps=5, shape='linear'))"
    before, after = (
        simulate(optimizer=optimizer, momentum_at=where, **{**SHORT, "workers": 1}).params
        for where in ("before", "after")
    )
    torch.testing.assert_close(before, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("synchronization", "architecture"), [("bsp", "gossip(ring)"), ("lag(0.1)", "allreduce")]
)
def test_momentum_cannot_come_before_what_is_no_gradient(synchronization, architecture) -> None:
    config = Config(
        optimizer="sgd(0.1, momentum=0.9)",
        momentum_at="before",
        synchronization=synchronization,
        architecture=architecture,
        compute="fixed(0.01)",
    )
    with pytest.raises(ValueError, match='momentum_at="before"'):
        prepare(config)
