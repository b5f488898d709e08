"""What ranks run to test that gradients may come in any order: buckets are exchanged in one."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import gradwire
from gradwire.models.base import Model
from gradwire.runtime.process.computation import ProcessComputation
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.training.task import Task

SIZE = 3
STEPS = 4
_WIDTH = 12


class _Branches(nn.Module):
    """Layers side by side. Which comes first in the forward pass depends on the inputs."""

    def __init__(self, num_inputs: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(num_inputs, _WIDTH)
        self.branches = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.last = nn.Linear(_WIDTH, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x.flatten(1)))
        start = int(x.sum() * 16) % len(self.branches)
        order = [(start + i) % len(self.branches) for i in range(len(self.branches))]
        made = [self.branches[number](hidden) for number in order]
        outputs: Tensor = self.last(torch.relu(sum(made, torch.zeros(()))))
        return outputs


@dataclass(frozen=True, repr=False)
class Branches(Model):
    """A model whose gradients come in an order that differs from rank to rank."""

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return _Branches(torch.Size(input_shape).numel(), num_classes)


SETTINGS: dict[str, Any] = {
    "model": "branches",
    "workers": SIZE,
    "steps": STEPS,
    "batch_size": 4,
    "eval_every": STEPS,
    "threads": 1,
    "evaluation": "sequential",
}
SCHEDULES = ("wfbp", "fusion(400, first=100)", "priority(300, credit=900)", "dear(300)")
NATIVE = SCHEDULES[::2]
_EXPECTED: dict[str, Tensor] = {}


def prepare(size: int) -> None:
    """What the simulator says."""
    gradwire.register(Branches)
    for schedule in SCHEDULES:
        run = gradwire.simulate(scheduling=schedule, compute="fixed(0.001)", **SETTINGS)
        _EXPECTED[schedule] = run.params


def run(rank: int, folder: Path) -> dict[str, Any]:
    """The order in which layers came, and how models differ from those of the simulator."""
    arrived: list[int] = []
    num_native: list[int] = []
    seen: dict[str, Any] = {"arrived": arrived, "num_native": num_native}
    advance, by_layer, close = (
        ProcessComputation.advance,
        Task.gradient_by_layer,
        GlooTransport.close,
    )

    def note(self: ProcessComputation, layer: int, result: Any) -> Any:
        arrived.append(layer)
        return advance(self, layer, result)

    def perturbed(self: Task, request: Any, on_layer: Any, *more: Any) -> None:
        """Rank 1 has all layers at once; rank 2 is slow, in other layers in each step."""
        last: list[Any] = []

        def keep(layer: int, result: Any) -> None:
            last[:] = [layer, result]

        def delay(layer: int, result: Any) -> None:
            time.sleep(0.002 * ((layer + len(arrived)) % 3))
            on_layer(layer, result)

        by_layer(self, request, {1: keep, 2: delay}.get(rank, on_layer), *more)
        if rank == 1:
            on_layer(*last)

    def count(self: GlooTransport, lost: int | None = None) -> None:
        num_native.append(self.num_native_means)
        close(self, lost)

    with (
        patch.object(ProcessComputation, "advance", note),
        patch.object(Task, "gradient_by_layer", perturbed),
        patch.object(GlooTransport, "close", count),
    ):
        for native, schedules in ((False, SCHEDULES), (True, NATIVE)):
            for schedule in schedules:
                found = gradwire.run(scheduling=schedule, native=native, **SETTINGS).params
                error = float((found - _EXPECTED[schedule]).abs().max())
                seen[f"{schedule}, native {native}"] = error
    return seen
