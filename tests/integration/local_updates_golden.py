"""Loops on the simulator's model and data, whose trajectories must be those of its runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradwire
from gradwire.experiment.run import setup
from gradwire.experiment.run.config import Config
from gradwire.models.base import build_seeded
from gradwire.models.mlp import MLP
from integration.loops import flat, is_same_everywhere

SIZE = 2
GOLDEN: dict[str, Any] = {
    "model": "mlp((8,))",
    "batch_size": 4,
    "steps": 10,
    "optimizer": "sgd(0.1, momentum=0.5)",
    "evaluation": "sequential",
    "threads": 1,
    "compute": "fixed(1)",
}
# Compressions that select by the data would select other elements where the rounding of a gradient
# differs; these do not depend on it.
LOCAL_SGD = (
    ("identity", "local"),
    ("ef(randomk(0.1))", "local"),
    ("ef(qsgd(bits=4))", "local"),
    ("identity", "average"),
    ("identity", "reset"),
)
DILOCO = (
    ("identity", {"period": 4}),
    ("ef(randomk(0.1))", {"period": 4}),
    ("ef(randomk(0.1))", {"period": 4, "fragments": 2}),
    ("identity", {"period": 4, "fragments": 3, "delay": 2, "mixing": 0.5}),
    ("ef(randomk(0.1))", {"period": 5, "delay": 3}),
)


def diloco_text(settings: dict[str, Any]) -> str:
    return f"diloco({', '.join(f'{name}={value}' for name, value in settings.items())})"


# Before the ranks start, so that it is done once: experiments and the runs of the simulator.
_experiments: dict[Config, Any] = {}
_simulated: dict[Config, Any] = {}


def prepare(size: int) -> None:
    for compression, momentum in LOCAL_SGD:
        simulate(_local_sgd_config(compression, momentum))
    for compression, settings in DILOCO:
        simulate(_diloco_config(compression, settings))


def simulate(config: Config) -> Any:
    _experiments[config] = setup.prepare(config)
    _simulated[config] = gradwire.simulate(config)
    return _simulated[config]


def _local_sgd_config(compression: str, momentum: str) -> Config:
    text = f'localsgd(4, momentum="{momentum}")'
    return Config(**GOLDEN, workers=SIZE, compression=compression, synchronization=text)


def _diloco_config(compression: str, settings: dict[str, Any]) -> Config:
    return Config(
        **GOLDEN,
        workers=SIZE,
        compression=compression,
        synchronization=diloco_text(settings),
        scheduling='sequential("layer")' if "fragments" in settings else "sequential",
    )


def train_golden(rank: int, config: Config, make: Callable[..., Any]) -> tuple[nn.Module, Any]:
    """A loop on the simulator's model and data: the model and the context."""
    experiment = _experiments[config]
    shape, classes = experiment.dataset.input_shape, experiment.dataset.num_classes
    model = build_seeded(MLP((8,)), shape, classes, config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    context = make(model, optimizer, seed=config.seed, native=False, timeout_s=60)
    for step in range(config.steps):
        inputs, targets = experiment.plan.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, context


def golden_local_sgd(compression: str, momentum: str, rank: int) -> list[float]:
    def make(*arguments: Any, **options: Any) -> Any:
        return gradwire.local_sgd(
            *arguments, period=4, compression=compression, momentum=momentum, **options
        )

    config = _local_sgd_config(compression, momentum)
    model, context = train_golden(rank, config, make)
    context.close()
    distance = difference(model, _simulated[config].params)
    return [distance, float(is_same_everywhere(flat(model)))]


def golden_diloco(compression: str, settings: dict[str, Any], rank: int) -> list[float]:
    def make(*arguments: Any, **options: Any) -> Any:
        return gradwire.diloco(*arguments, compression=compression, **settings, **options)

    config = _diloco_config(compression, settings)
    model, context = train_golden(rank, config, make)
    context.close()
    distance = difference(model, _simulated[config].params)
    return [distance, float(is_same_everywhere(flat(model)))]


def difference(model: nn.Module, params: torch.Tensor) -> float:
    return float((flat(model) - params).abs().max())
