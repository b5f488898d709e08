"""Schedules that measure during the first steps; `optimizer_cases.py` runs them."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from integration.loops import distributed, flat, is_same, is_same_everywhere, loss_of, make_model

MEASURED = ("identity", "ef(topk(0.1))", "powersgd(1)", "ef(sign)")


def run(rank: int) -> dict[str, Any]:
    return {
        "measured": {name: _measured(name, rank) for name in MEASURED},
        "accumulated": _measured("ef(topk(0.1))", rank, backward_passes_per_step=2),
        "types": _measured_types(rank),
    }


class _Slow(torch.autograd.Function):
    """A layer whose backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        until = time.perf_counter() + 0.01
        while time.perf_counter() < until:
            pass
        return gradients[0]


class _SlowLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x)


def _measured(compression: str, rank: int, **options: Any) -> list[Any]:
    """The difference to a run without it, and the schedule before and after."""
    models, found = [], []
    for scheduling in ("sequential", "mgwfbp"):
        layers = list(make_model())
        model = nn.Sequential(*layers[:2], _SlowLayer(), *layers[2:])
        optimizer = distributed(model, compression, scheduling=scheduling, **options)
        before = optimizer.scheduling
        is_equal = True
        for step in range(10):
            optimizer.zero_grad()
            for own in range(options.get("backward_passes_per_step", 1)):
                loss_of(model, rank, 10 * own + step).backward()
            optimizer.step()
            is_equal = is_equal and is_same(model)
        models.append(flat(model))
        found = [before, optimizer.scheduling, is_equal, optimizer.stats().steps]
        layouts = [[name for name, *_ in own] for own in optimizer._buckets.layouts]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, layouts)
    difference = float((models[0] - models[1]).abs().max())
    return [*found, all(own == layouts for own in everyone), difference]


def _measured_types(rank: int) -> Any:
    """Parameters of two types, of which some have no gradients."""
    torch.manual_seed(0)
    model = nn.ModuleList([make_model(), nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2)])
    optimizer = distributed(model, "ef(topk(0.2))", scheduling="mgwfbp")
    is_equal = True
    for step in range(8):
        optimizer.zero_grad()
        inputs = torch.full((1, 2), rank + 1.0, dtype=torch.float64)
        (loss_of(model[0], rank, step) + model[1](inputs).square().sum()).backward()
        optimizer.step()
        is_equal = is_equal and is_same_everywhere(flat(model[0])) and is_same(model[1])
    return is_equal
