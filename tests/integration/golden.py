"""Loops on the simulator's own model and data, whose trajectories must be those of its runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import gradwire
from gradwire.core.profile import Profile
from gradwire.core.protocols import Bucket
from gradwire.experiment.run import setup
from gradwire.experiment.run.config import Config
from gradwire.models.base import build_seeded
from gradwire.models.mlp import MLP
from gradwire.scheduling import SCHEDULING
from gradwire.scheduling.sequential import Sequential
from integration.loops import ddp, flat, is_same_everywhere

SIZE = 2
SETTINGS: dict[str, Any] = {
    "workers": SIZE,
    "model": "mlp((8,))",
    "batch_size": 4,
    "steps": 5,
    "optimizer": "sgd(0.1)",
    "evaluation": "sequential",
    "threads": 1,
    "compute": "fixed(1)",
}
# Compression, and whether DDP rebuilds its bucket after the first step. It turns the order of the
# tensors around then, so that other elements would be drawn.
HOOKS = (
    ("identity", False),
    ("identity", True),
    ("powersgd(1)", False),
    ("powersgd(1)", True),
    ("ef(powersgd(2))", True),
    ("ef(randomk(0.1))", False),
    ("ef(qsgd(bits=4))", False),
)


@dataclass(frozen=True, repr=False)
class OneBucket(Sequential):
    """The bucket has the name that the hook gives it: what is drawn depends on the name."""

    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        return [Bucket("bucket 0", tensors[0].start, tensors[-1].stop)]


def with_optimizer(compression: str, scheduling: str, rank: int) -> list[float]:
    """The difference to the simulator after a run, and whether replicas are equal."""
    config = Config(**SETTINGS, compression=compression, scheduling=scheduling)
    model, experiment = _start(config)
    optimizer = gradwire.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression,
        scheduling=scheduling,
        seed=config.seed,
        native=False,
    )
    return _compared(model, optimizer, experiment, config, rank)


def with_hook(compression: str, rebuilds: bool, rank: int) -> list[float]:
    """The same under DDP, with one bucket."""
    SCHEDULING.register(OneBucket)
    config = Config(**SETTINGS, compression=compression, scheduling="one_bucket")
    model, experiment = _start(config)
    options = {"seed": config.seed, "native": False}
    wrapped, _ = ddp(
        model,
        compression,
        hook_options=options,
        bucket_cap_mb=25,
        find_unused_parameters=not rebuilds,  # then DDP never rebuilds
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    return _compared(wrapped, optimizer, experiment, config, rank)


def _start(config: Config) -> tuple[nn.Module, Any]:
    experiment = setup.prepare(config)
    shape, classes = experiment.dataset.input_shape, experiment.dataset.num_classes
    return build_seeded(MLP((8,)), shape, classes, config.seed), experiment


def _compared(
    model: nn.Module, optimizer: Any, experiment: Any, config: Config, rank: int
) -> list[float]:
    for step in range(config.steps):
        inputs, targets = experiment.plan.batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    simulated = gradwire.simulate(config)
    difference = float((flat(model) - simulated.params).abs().max())
    return [difference, float(is_same_everywhere(flat(model)))]
