"""Gradients that come layer by layer have the bits of those that come as a whole."""

import pytest
import torch

from gradwire.core.key import Key
from gradwire.core.profile import layers_of
from gradwire.experiment.run.registries import MODELS
from gradwire.models.base import build_seeded
from gradwire.training.gradient import GradientRequest, GradientResult
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
    results: list[GradientResult] = []

    def on_layer(number: int, result: GradientResult) -> None:
        seen.append(number)
        results.append(result)
        # What has been reached stays as it is.
        start = layers[number].start
        assert torch.equal(result.gradient[start:], whole.gradient[start:])

    task.gradient_by_layer(request, on_layer)
    assert seen == sorted(set(seen), reverse=True)
    assert seen[-1] == 0
    assert len(seen) > len(layers) // 2  # a callback now and then brings several layers
    assert torch.equal(results[-1].gradient, whole.gradient)
    assert torch.equal(results[-1].loss, whole.loss)
    assert results[-1].buffers.keys() == whole.buffers.keys()
    assert all(
        torch.equal(results[-1].buffers[name], whole.buffers[name]) for name in whole.buffers
    )


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
