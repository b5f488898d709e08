"""Tasks: evaluation by hand, initial values, messages for wrong arguments."""

import math

import pytest
import torch
from torch import nn

from gradwire.core.key import Key
from gradwire.models.mlp import MLP
from gradwire.training.task import GradientRequest, Task


@pytest.fixture
def task() -> Task:
    """Two inputs, two classes, logits = inputs."""
    with torch.random.fork_rng(devices=[]):
        module = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(2), nn.Linear(2, 2))
    with torch.no_grad():
        module[2].weight.copy_(torch.eye(2))
        module[2].bias.zero_()
    return Task(MLP(), module)


def test_evaluate_by_hand(task: Task) -> None:
    # Running mean 1 and variance 4 - eps: the norm makes (x - 1) / 2 of its inputs.
    buffers = task.initial_buffers()
    buffers["1.running_mean"] = torch.ones(2)
    buffers["1.running_var"] = torch.full((2,), 4.0 - 1e-5)
    batches = [
        (torch.tensor([[3.0, 1.0], [1.0, 1.0]]), torch.tensor([0, 1])),  # logits (1, 0), (0, 0)
        (torch.tensor([[1.0, 5.0]]), torch.tensor([1])),  # logits (0, 2)
    ]
    expected = math.log1p(math.exp(-1)) + math.log(2) + math.log1p(math.exp(-2))
    for chunk_size in (1, 2, 1024):
        loss, accuracy = task.evaluate(task.initial_params(), buffers, batches, chunk_size)
        assert loss == pytest.approx(expected / 3, abs=1e-6)
        assert accuracy == pytest.approx(2 / 3)


def test_evaluate_uses_the_parameters_it_is_given(task: Task) -> None:
    params = task.initial_params()
    batches = [(torch.tensor([[3.0, 1.0]]), torch.tensor([0]))]
    assert task.evaluate(params, task.initial_buffers(), batches).accuracy == 1.0
    views = task.layout.unflatten(params)
    flipped = task.layout.join([-v if name == "2.weight" else v for name, v in views.items()])
    assert task.evaluate(flipped, task.initial_buffers(), batches).accuracy == 0.0
    with pytest.raises(ValueError, match="at least one example"):
        task.evaluate(params, task.initial_buffers(), [])


def test_text_counts_every_position() -> None:
    with torch.random.fork_rng(devices=[]):
        embedding = nn.Embedding(3, 3)
    with torch.no_grad():
        embedding.weight.copy_(10.0 * torch.eye(3))  # predicts its input
    task = Task(MLP(), embedding)
    batch = (torch.tensor([[0, 1, 2], [0, 0, 0]]), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert task.evaluate(task.initial_params(), {}, [batch]).accuracy == pytest.approx(4 / 6)


def test_evaluation_does_not_disturb_training(task: Task) -> None:
    inputs, targets = Key(1).normal(16).view(8, 2), torch.arange(8) % 2
    request = GradientRequest(
        task.initial_params(), task.initial_buffers(), inputs, targets, Key(2)
    )
    (before,) = task.gradients([request])
    task.evaluate(request.params, request.buffers, [(inputs, targets)])
    (after,) = task.gradients([request])
    assert torch.equal(before.gradient, after.gradient)


def test_wrong_parameters_and_buffers_are_named(task: Task) -> None:
    inputs, targets = torch.zeros(2, 2), torch.tensor([0, 1])
    params, buffers = task.initial_params(), task.initial_buffers()
    with pytest.raises(ValueError, match=r"has 10 parameters.*got shape \(9,\)"):
        task.gradients([GradientRequest(params[:9], buffers, inputs, targets, Key(0))])
    with pytest.raises(ValueError, match=r"torch.float32, got shape \(10,\) of type torch.float64"):
        task.gradients([GradientRequest(params.double(), buffers, inputs, targets, Key(0))])
    with pytest.raises(ValueError, match=r"start from task.initial_buffers\(\)"):
        task.gradients([GradientRequest(params, {}, inputs, targets, Key(0))])


def test_initial_values_are_copies(task: Task) -> None:
    params, buffers = task.initial_params(), task.initial_buffers()
    task.initial_params().zero_()
    task.initial_buffers()["1.running_mean"].add_(1.0)
    assert torch.equal(task.initial_params(), params)
    assert torch.equal(task.initial_buffers()["1.running_mean"], buffers["1.running_mean"])
