"""Gradients that come layer by layer have the bits of those that come as a whole."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradwire.core.key import Key
from gradwire.core.profile import layers_of
from gradwire.experiment.run.registries import MODELS
from gradwire.models.base import build_seeded
from gradwire.training.evaluation.arriving import ArrivingParams
from gradwire.training.gradient import GradientRequest, StepResult
from gradwire.training.layer_times import Flops, layer_flops, measure_layers, task_tensors
from gradwire.training.task import Task

CASES = [
    ("mlp((16, 8))", (1, 8, 8), "vmap"),
    ("mlp((16, 8))", (1, 8, 8), "sequential"),
    ("mnist_cnn", (1, 28, 28), "sequential"),
    ("mnist_cnn", (1, 28, 28), "vmap"),
    ("nanogpt(1, width=16)", (8,), "vmap"),
    ("nanogpt(1, width=16)", (8,), "sequential"),
    ("char_lstm", (8,), "sequential"),
    ("resnet20", (3, 32, 32), "sequential"),
]


def make(model: str, shape: tuple[int, ...], mode: str) -> tuple[Task, GradientRequest]:
    parsed = MODELS.parse(model)
    task = Task(parsed, build_seeded(parsed, shape, 10, 0), mode=mode)  # type: ignore[arg-type]
    draws = torch.Generator().manual_seed(1)
    is_text = len(shape) == 1
    inputs = torch.randn(2, *shape, generator=draws)
    if is_text:
        inputs = torch.randint(0, 10, (2, *shape), generator=draws)
    targets = torch.randint(0, 10, (2, *shape) if is_text else (2,), generator=draws)
    key = Key(0).at(3).private(1)
    return task, GradientRequest(
        task.initial_params(), task.initial_buffers(), inputs, targets, key
    )


@pytest.mark.parametrize(("model", "shape", "mode"), CASES)
def test_the_bits_are_those_of_the_whole(model, shape, mode):
    task, request = make(model, shape, mode)
    (whole,) = task.gradients([request])
    layers = layers_of(task_tensors(task))
    seen: list[int] = []
    results: list[StepResult] = []
    numel = task.layout.numel

    def on_layer(number: int, result: StepResult) -> None:
        seen.append(number)
        results.append(result)
        start = layers[number].start
        assert torch.equal(result.piece(start, numel), whole.gradient[start:])

    task.gradient_by_layer(request, on_layer)
    assert seen == sorted(set(seen), reverse=True)
    assert seen[-1] == 0
    assert len(seen) > len(layers) // 2  # a callback now and then brings several layers
    for start, stop in ((0, numel), (0, 1), (3, numel - 5), (numel // 2, numel // 2 + 7)):
        assert torch.equal(results[-1].piece(start, stop), whole.gradient[start:stop])
    assert torch.equal(results[-1].loss, whole.loss)
    assert results[-1].buffers.keys() == whole.buffers.keys()
    assert all(
        torch.equal(results[-1].buffers[name], whole.buffers[name]) for name in whole.buffers
    )


@pytest.mark.parametrize(("model", "shape", "mode"), CASES)
def test_the_forward_pass_reads_parameters_when_they_are_there(model, shape, mode):
    task, request = make(model, shape, mode)
    (whole,) = task.gradients([request])
    layers = layers_of(task_tensors(task))
    arriving = torch.full_like(request.params, torch.nan)
    opened: list[int] = []
    results: list[StepResult] = []

    def before_layer(number: int) -> None:
        opened.append(number)
        stop = layers[number].stop
        arriving.data[:stop] = request.params[:stop]

    task.gradient_by_layer(
        replace(request, params=arriving), lambda _, result: results.append(result), before_layer
    )
    assert torch.equal(results[-1].piece(0, task.layout.numel), whole.gradient)
    assert opened == sorted(set(opened))
    assert opened[-1] == len(layers) - 1
    if mode == "sequential":
        assert len(opened) > len(layers) // 2


def test_a_module_may_read_the_parameters_of_another():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 10), nn.Linear(10, 10)

        def forward(self, images: Tensor) -> Tensor:
            weight = self.last.weight  # before the module it belongs to is called
            return self.last(self.first(images.flatten(1)) @ weight)

    with torch.random.fork_rng():
        task = Task(MODELS.parse("mlp"), Reader(), mode="sequential")
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, 1, 8, 8, generator=draws)
    request = GradientRequest(task.initial_params(), {}, inputs, torch.tensor([1, 2]), Key(0))
    arriving, opened = torch.full_like(request.params, torch.nan), []

    def before_layer(number: int) -> None:
        opened.append(number)
        arriving.data[: (650, 760)[number]] = request.params[: (650, 760)[number]]

    losses = []
    task.gradient_by_layer(
        replace(request, params=arriving),
        lambda _, result: losses.append(result.loss),
        before_layer,
    )
    assert opened == [0, 1]
    assert torch.equal(losses[-1], task.gradients([request])[0].loss)


def test_a_layer_that_is_not_used_is_waited_for_and_has_a_gradient_of_zero():
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unused = nn.Linear(64, 10), nn.Linear(3, 2)

        def forward(self, images: Tensor) -> Tensor:
            return self.first(images.flatten(1))

    with torch.random.fork_rng():
        task = Task(MODELS.parse("mlp"), Idle(), mode="sequential")
    inputs, targets = torch.ones(2, 1, 8, 8), torch.tensor([1, 2])
    request = GradientRequest(task.initial_params(), {}, inputs, targets, Key(0))
    opened: list[int] = []
    results: list[StepResult] = []
    task.gradient_by_layer(request, lambda _, result: results.append(result), opened.append)
    assert opened == [0, 1]
    assert torch.equal(results[-1].piece(650, 658), torch.zeros(8))
    assert torch.equal(results[-1].piece(0, 658), task.gradients([request])[0].gradient)


def test_flops_of_linear_layers():
    task, request = make("mlp((16, 8))", (1, 8, 8), "sequential")
    flops = layer_flops(task, (request.inputs, request.targets))
    assert flops == [2 * 2 * 64 * 16, 2 * 2 * 16 * 8, 2 * 2 * 8 * 10]
    forward, backward = Flops().shares(task, (request.inputs, request.targets))
    assert backward == tuple(2 * own for own in forward)


def test_flops_of_convolutions():
    task, request = make("mnist_cnn", (1, 28, 28), "sequential")
    flops = layer_flops(task, (request.inputs, request.targets))
    conv1 = dict(task.module.named_parameters())
    name, weight = next(iter(conv1.items()))
    size = 28 - weight.shape[-1] + 1
    assert name.endswith("weight")
    assert flops[0] == 2 * weight.numel() * 2 * size * size


@pytest.mark.parametrize(("model", "shape", "mode"), CASES[::2])
def test_every_layer_takes_some_time(model, shape, mode):
    task, request = make(model, shape, mode)
    layers = layers_of(task_tensors(task))
    for shares in (
        Flops().shares(task, (request.inputs, request.targets)),
        measure_layers(task, (request.inputs, request.targets)),
    ):
        assert len(shares.forward) == len(shares.backward) == len(layers)
        assert min(*shares.forward, *shares.backward) > 0


@pytest.mark.parametrize("read", [lambda w: w.T, lambda w: w.mT, lambda w: w.data, lambda w: w.t()])
def test_views_of_parameters_are_waited_for(read):
    """A product of `weight.T` reads the weight, though no operation has it as an argument."""
    weight, waited = nn.Parameter(torch.zeros(2, 2)), []
    with ArrivingParams({id(weight): 0}, waited.append):
        assert weight.shape == (2, 2)
        assert weight.dtype is torch.float32
        assert waited == []
        view = read(weight)
        assert waited == [0]
        torch.ones(1, 2) @ view
    assert waited == [0]
