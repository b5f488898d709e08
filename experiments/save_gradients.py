"""What do real gradients look like? Trains small networks and keeps a few of their gradients.

    GRADWIRE_DATA=... python experiments/save_gradients.py

writes src/gradwire/data/gradients.npz, which `gradwire codecs` and tests read through
`gradwire.experiment.studies.gradients`. Each network trains with gradwire itself, on one worker;
early is after 20 steps, late after several hundred. What is kept is worker 0's gradient of the next
mini-batch, whole layers of it in float32 (a narrower format would flatter fp16 and bf16), and one
layer of nanogpt as four workers see it, for methods that are more than one message. Only numbers
computed here are stored, nothing of the data sets.

Answer: heavy tails, far from a Gaussian's kurtosis of 3, which is why top-k keeps so much
of the energy. The figures lie in the file (`facts`) and are printed by this script.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import gradwire
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.experiment.studies.gradients import FILE, facts
from gradwire.training.gradient import GradientRequest

EARLY = 20
NUM_WORKERS = 4
# Settings, steps until late, and the layers kept: those whose names start with one of these.
NETWORKS: dict[str, tuple[dict[str, object], int, tuple[str, ...]]] = {
    "mlp": ({"data": "digits", "model": "mlp", "batch_size": 16}, 400, ("",)),
    "mnist_cnn": (
        {"data": "mnist", "model": "mnist_cnn", "batch_size": 32, "optimizer": "sgd(0.05)"},
        600,
        ("",),
    ),
    "char_lstm": (
        {
            "data": "shakespeare",
            "model": "char_lstm(hidden=64)",
            "batch_size": 16,
            "optimizer": "adam(0.003)",
        },
        400,
        ("",),
    ),
    "nanogpt": (
        {
            "data": "shakespeare",
            "model": "nanogpt(layers=2)",
            "batch_size": 16,
            "optimizer": "adam(0.001)",
        },
        400,
        ("symbols", "blocks.0.attention.qkv", "blocks.0.norm", "norm"),
    ),
}
SHARED_LAYER = ("nanogpt", "blocks.1.attention.out.weight")


def gradients(settings: dict[str, object], step: int) -> Iterator[dict[str, Tensor]]:
    """By layer, for each of some workers that all hold the model after `step` steps."""
    run = gradwire.simulate(
        **settings, workers=1, steps=step, eval_every=step, compute="fixed(0)", threads=1
    )
    config = Config(**settings, workers=NUM_WORKERS, compute="fixed(0)")  # type: ignore[arg-type]
    plan = prepare(config).plan
    for rank in range(NUM_WORKERS):
        inputs, targets = plan.batch(rank, step)
        key = plan.key.at(step).private(rank)
        request = GradientRequest(run.params, run.buffers, inputs, targets, key)
        (result,) = plan.task.gradients([request])
        yield plan.task.layout.unflatten(result.gradient)


def main() -> None:
    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {}
    told: dict[str, object] = {}
    for name, (settings, late, prefixes) in NETWORKS.items():
        for phase, step in (("early", EARLY), ("late", late)):
            workers = list(gradients(settings, step))
            kept = {n: g for n, g in workers[0].items() if n.startswith(prefixes)}
            vector = torch.cat([g.reshape(-1) for g in kept.values()])
            label = f"{name} {phase}"
            arrays[label] = vector.numpy()
            told[label] = {
                **{n: settings[n] for n in ("model", "data")},
                "step": step,
                "layers": {n: list(g.shape) for n, g in kept.items()},
                **facts(vector),
            }
            print(label, {n: v for n, v in told[label].items() if n != "layers"})  # type: ignore
            if (name, phase) == (SHARED_LAYER[0], "late"):
                arrays["workers"] = torch.stack([w[SHARED_LAYER[1]] for w in workers]).numpy()
    arrays["facts"] = np.array(json.dumps(told))
    np.savez_compressed(FILE, **arrays)
    print(f"{Path(FILE).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
