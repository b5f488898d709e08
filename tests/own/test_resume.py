"""Records of runs that were given Python objects, and resuming them."""

import pytest
import torch
from torch import nn

import gradwire


def interrupt(row, steps):
    raise KeyboardInterrupt


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


SETTINGS = {"workers": 2, "batch_size": 8, "steps": 6, "compute": "fixed(0.01)", "eval_every": 2}


@pytest.fixture
def half(tmp_path, points, build):
    with pytest.raises(KeyboardInterrupt):
        gradwire.simulate(
            model=build(net), data=points, out=tmp_path / "half", progress=interrupt, **SETTINGS
        )
    return tmp_path / "half"


@pytest.mark.parametrize("evaluation", ["vmap", "sequential"])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, points, build, evaluation):
    settings = {**SETTINGS, "evaluation": evaluation, "model": build(net), "data": points}
    whole = gradwire.simulate(**settings)
    with pytest.raises(KeyboardInterrupt):
        gradwire.simulate(out=tmp_path / "run", progress=interrupt, **settings)
    resumed = gradwire.resume(tmp_path / "run", model=build(net), data=points)
    assert torch.equal(resumed.params, whole.params)
    for name, buffer in whole.buffers.items():
        assert torch.equal(resumed.buffers[name], buffer)


def test_it_says_what_it_needs(half, points, build):
    with pytest.raises(ValueError, match=r"data = object:tensors#\w+ was given.*resume\(FOLDER"):
        gradwire.resume(half)
    with pytest.raises(ValueError, match=r"model = object:Sequential#\w+ was given to gradwire"):
        gradwire.resume(half, data=points)


def test_it_refuses_another_module_and_other_data(half, points, build):
    with pytest.raises(ValueError, match=r"structure and initial parameters differ"):
        gradwire.resume(half, model=build(net, 2), data=points)
    (x, y), test = points
    with pytest.raises(ValueError, match=r"type and examples differ"):
        gradwire.resume(half, model=build(net), data=((x + 1, y), test))


def test_it_takes_only_what_the_run_had(half, points, build):
    with pytest.raises(
        ValueError, match=r"loss was given, but this run has loss = 'cross_entropy'"
    ):
        gradwire.resume(half, model=build(net), data=points, loss=nn.functional.cross_entropy)
    with pytest.raises(ValueError, match=r"give no workers"):
        gradwire.resume(half, workers=3)


def test_functions_that_can_be_imported_need_not_be_given_again(tmp_path, points, build):
    with pytest.raises(KeyboardInterrupt):
        gradwire.simulate(
            model=build(net),
            data=points,
            loss=nn.functional.cross_entropy,
            out=tmp_path / "run",
            progress=interrupt,
            **SETTINGS,
        )
    again = {"model": build(net), "data": points}
    run = gradwire.resume(tmp_path / "run", **again)
    assert run.config.loss == "torch.nn.functional:cross_entropy"
    given = gradwire.resume(
        tmp_path / "run", **again, loss=nn.functional.cross_entropy, say=lambda text: None
    )
    assert torch.equal(given.params, run.params)
