"""Where momentum lives: on the mean, before compression, or inside a method of its own."""

import warnings

import pytest
import torch

from gradwire import simulate
from gradwire.compression import COMPRESSION
from gradwire.core.errors import GradwireWarning
from gradwire.experiment.momentum import place
from gradwire.synchronization.bsp import BSP
from gradwire.synchronization.localsgd import LocalSGD
from gradwire.training.optimizer import SGD, Adam

MOMENTUM = SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
SHORT = {"epochs": 1.0, "workers": 2, "threads": 1, "compute": "fixed(0.01)"}


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


def test_a_run_may_be_gone_on_with_where_it_was(tmp_path) -> None:
    from gradwire import resume

    settings = {**SHORT, "compression": "ef(topk(0.05))", "optimizer": "sgd(0.05, momentum=0.9)"}
    whole = simulate(out=tmp_path / "run", **settings)
    assert whole.config.momentum_at == "before"
    again = resume(tmp_path / "run")
    assert torch.equal(again.params, whole.params)


def test_clipping_comes_before_the_momentum() -> None:
    """Lin et al. 2018, sec. 3.2: each of n gradients to 1/sqrt(n) of the norm."""
    settings = {**SHORT, "steps": 1, "compression": "velocity(identity)", "optimizer": "sgd(1.0)"}
    start = simulate(**{**settings, "optimizer": "sgd(0.0)"}).params
    clipped = simulate(clip_norm=0.01, **settings).params
    # Two gradients of norm 0.01/sqrt(2) each: their mean is no longer than that.
    moved = float((clipped - start).norm())
    assert 0 < moved <= 0.01 / 2**0.5 * 1.001


def test_any_hyper_parameter_may_change_with_time() -> None:
    """The optimizer's too: a ramp of one step is a schedule that changes after one."""
    settings = {**SHORT, "steps": 4}
    ramp = simulate(optimizer="sgd(ramp(0.2, 0.02, steps=1))", **settings)
    step = simulate(optimizer="sgd(0.2)", schedule="step((1,))", **settings)
    torch.testing.assert_close(ramp.params, step.params, rtol=1e-6, atol=1e-7)


def test_a_momentum_may_begin_at_zero() -> None:
    grown = simulate(optimizer="sgd(0.1, momentum=ramp(0, 0.9, steps=2, shape='linear'))", **SHORT)
    assert grown.accuracy > 0.5
