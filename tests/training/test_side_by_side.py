"""Gradients of several workers on several threads have the bits of one after another."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import gradwire
from gradwire.core.key import Key
from gradwire.experiment.run.threads import use_threads
from gradwire.models.base import Model, build_seeded
from gradwire.models.mnist_cnn import MnistCNN
from gradwire.models.resnet20 import ResNet20
from gradwire.training.evaluation.side_by_side import CORES_VARIABLE, num_cores
from gradwire.training.gradient import GradientRequest, GradientResult
from gradwire.training.task import Task

CASES = {
    "mnist_cnn, with dropout": (MnistCNN(), (1, 28, 28)),
    "resnet20": (ResNet20(), (3, 32, 32)),
}


def results(model: Model, shape: tuple[int, ...], num: int) -> list[GradientResult]:
    task = Task(model, build_seeded(model, shape, 10, 1), mode="sequential")
    params, buffers = task.initial_params(), task.initial_buffers()
    requests = []
    for rank in range(num):
        key = Key(2).private(rank)
        inputs = key.child("inputs").normal(3 * torch.Size(shape).numel()).view(3, *shape)
        targets = key.child("targets").integers(3, 10)
        requests.append(GradientRequest(params + 1e-3 * rank, buffers, inputs, targets, key))
    return task.gradients(requests)


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_cores(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = CASES[case]
    found = {}
    with use_threads(1):
        for cores in ("1", "3"):
            monkeypatch.setenv(CORES_VARIABLE, cores)
            found[cores] = results(model, shape, 7)
    for one, other in zip(found["1"], found["3"], strict=True):
        assert torch.equal(one.gradient, other.gradient)
        assert torch.equal(one.loss, other.loss)
        assert one.buffers.keys() == other.buffers.keys()
        assert all(torch.equal(one.buffers[name], other.buffers[name]) for name in one.buffers)


@dataclass(frozen=True, repr=False)
class Failing(Model):
    """A network whose loss fails."""

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> Any:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LSTM(8, 2))

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss")


def test_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "2")
    with use_threads(1), pytest.raises(ValueError, match="no loss"):
        results(Failing(), (8,), 3)


def test_runs_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for cores in ("1", "2"):
        monkeypatch.setenv(CORES_VARIABLE, cores)
        run = gradwire.simulate(
            workers=3, steps=4, evaluation="sequential", threads=1, compute="fixed(0.01)"
        )
        ends.append(run.params)
    assert torch.equal(*ends)


def test_the_variable_says_how_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CORES_VARIABLE, "5")
    assert num_cores() == 5
    monkeypatch.delenv(CORES_VARIABLE)
    assert num_cores() >= 1
