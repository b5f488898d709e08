"""Gradients of several mini-batches, exchanged as one mean."""

import pytest
import torch

import gradwire

SETTINGS = {
    "workers": 2,
    "model": "mlp((16, 8))",
    "steps": 4,
    "eval_every": 4,
    "compute": "fixed(0.01)",
    "coding": "free",
    "threads": 1,
    "evaluation": "sequential",
    "optimizer": "sgd(0.05, momentum=0.9)",
}


def test_two_mini_batches_are_one_of_twice_the_size():
    """One worker: the mini-batches of a step follow one another in the data."""
    settings = {**SETTINGS, "workers": 1}
    parts = gradwire.simulate(batch_size=8, accumulate=2, **settings)
    whole = gradwire.simulate(batch_size=16, **settings)
    torch.testing.assert_close(parts.params, whole.params, rtol=1e-5, atol=1e-6)
    assert parts.metrics[-1]["train_loss"] == pytest.approx(whole.metrics[-1]["train_loss"], 1e-5)
    assert parts.summary["virtual_time_s"] == pytest.approx(2 * whole.summary["virtual_time_s"])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compression": "ef(topk(0.1))"},
        {"synchronization": "localsgd(2)"},
        {"architecture": "parameter_server(1)"},
        {"architecture": "parameter_server(1)", "synchronization": "asp"},
    ],
    ids=str,
)
def test_as_many_bytes_as_without(settings):
    once = gradwire.simulate(**SETTINGS, **settings)
    four = gradwire.simulate(accumulate=4, **SETTINGS, **settings)
    assert four.summary["bytes_sent"] == pytest.approx(once.summary["bytes_sent"], rel=0.01)
    assert not torch.equal(four.params, once.params)


@pytest.mark.parametrize("scheduling", ["wfbp", "fusion(800)", "priority(400)", "dear(400)"])
def test_only_the_last_backward_pass_is_overlapped(scheduling):
    settings = {**SETTINGS, "compression": "identity", "bandwidth": "10Mbit"}
    expected = gradwire.simulate(accumulate=3, **settings)
    found = gradwire.simulate(accumulate=3, scheduling=scheduling, **settings)
    assert torch.equal(found.params, expected.params)
    assert found.metrics[-1]["train_loss"] == expected.metrics[-1]["train_loss"]
    assert 0.12 <= found.summary["virtual_time_s"] < expected.summary["virtual_time_s"]


def test_epochs_have_fewer_steps():
    once = gradwire.simulate(**{**SETTINGS, "steps": 0}, epochs=1.0)
    twice = gradwire.simulate(**{**SETTINGS, "steps": 0}, epochs=1.0, accumulate=2)
    assert twice.summary["steps"] == pytest.approx(once.summary["steps"] / 2, abs=1)


def test_none_is_refused():
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        gradwire.simulate(accumulate=0, **SETTINGS)
