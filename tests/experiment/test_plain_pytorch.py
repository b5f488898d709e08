"""One worker, identity, BSP: the simulator is a plain PyTorch training loop, model by model."""

import pytest
import torch

import gradwire
from gradwire import data
from gradwire.core.key import Key
from gradwire.data.dataset import Dataset
from gradwire.data.partition import Iid
from gradwire.data.sampler import Sampler
from gradwire.experiment.run.registries import MODELS
from gradwire.models.base import build_seeded
from sampling import slow

STEPS = 50


def images(shape: tuple[int, ...]) -> Dataset:
    """Noise with a label-dependent mean: something to learn, of the shape a model wants."""
    key = Key(3)
    labels = key.child("labels").integers(64, 10)
    noise = key.child("noise").uniform(64 * torch.Size(shape).numel()).reshape(64, *shape)
    pixels = (noise * 128 + labels.reshape(-1, *[1] * len(shape)) * 12).to(torch.uint8)
    channels = shape[0]
    return Dataset(
        "images",
        "image",
        pixels,
        labels.to(torch.uint8),
        pixels,
        labels.to(torch.uint8),
        10,
        mean=(110.0,) * channels,
        std=(50.0,) * channels,
    )


def text() -> Dataset:
    letters = Key(4).integers(48 * 21, 20).reshape(48, 21).to(torch.uint8)
    inputs, targets = letters[:, :-1].contiguous(), letters[:, 1:].contiguous()
    return Dataset("text", "text", inputs, targets, inputs, targets, 20, vocabulary="a" * 20)


@pytest.mark.few
@pytest.mark.parametrize(
    ("model", "dataset", "optimizer", "reference"),
    [
        (
            "mlp",
            images((1, 8, 8)),
            "sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.0005)",
            lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True, weight_decay=0.0005),
        ),
        slow("mlp", images((1, 8, 8)), "adam(0.001)", lambda p: torch.optim.Adam(p, 0.001)),
        slow(
            "resnet20",
            images((3, 16, 16)),
            "sgd(0.01, momentum=0.9)",
            lambda p: torch.optim.SGD(p, 0.01, 0.9),
        ),
        ("char_lstm", text(), "sgd(0.5)", lambda p: torch.optim.SGD(p, 0.5)),
    ],
    ids=["mlp-sgd", "mlp-adam", "resnet20", "char_lstm"],
)
def test_one_worker_is_a_plain_loop(model, dataset, optimizer, reference, monkeypatch):
    monkeypatch.setattr(data, "load", lambda name: dataset)
    run = gradwire.simulate(
        model=model,
        workers=1,
        steps=STEPS,
        batch_size=4,
        optimizer=optimizer,
        compute="fixed(0)",
        eval_every=STEPS,
    )
    expression = MODELS.parse(model)
    module = build_seeded(expression, dataset.input_shape, dataset.num_classes, 0).train()
    if model == "resnet20":  # as the simulator: other kernels round otherwise, and it adds up
        module = module.to(memory_format=torch.channels_last)
    steps = reference(module.parameters())
    sampler = Sampler(dataset, Iid(), 1, 4, Key(0).child("data"))
    for step in range(STEPS):
        indices = sampler.indices(0, step)
        steps.zero_grad()
        inputs = dataset.inputs(indices)
        if model == "resnet20":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        outputs = module(inputs)
        expression.loss(outputs, dataset.targets(indices)).backward()
        steps.step()
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    torch.testing.assert_close(run.params, expected, rtol=0, atol=1e-6)
    for name, buffer in run.buffers.items():
        torch.testing.assert_close(buffer, module.get_buffer(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "dataset"),
    [("char_lstm", text()), slow("nanogpt(1, heads=2, width=16)", text())],
    ids=["char_lstm", "nanogpt"],
)
def test_three_workers_are_one_with_the_whole_batch(model, dataset, monkeypatch):
    monkeypatch.setattr(data, "load", lambda name: dataset)
    common = {"model": model, "steps": 5, "optimizer": "sgd(0.1)", "compute": "fixed(0)"}
    three = gradwire.simulate(**common, workers=3, batch_size=4)
    one = gradwire.simulate(**common, workers=1, batch_size=12)
    torch.testing.assert_close(three.params, one.params, rtol=0, atol=1e-6)
