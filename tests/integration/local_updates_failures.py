"""Ranks that differ or are killed under local updates: what each of them got."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from integration.loops import loss_of, make_model, sgd

SIZE = 3


def _outer(lr: float) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


# By name: what makes a context on a rank.
DIFFERENT: dict[str, Callable[[nn.Module, int], Any]] = {
    "period": lambda m, rank: gradwire.local_sgd(m, sgd(m), period=4 if rank == 1 else 8),
    "compression": lambda m, rank: gradwire.local_sgd(
        m, sgd(m), compression="ef(sign)" if rank == 1 else "identity"
    ),
    "method": lambda m, rank: gradwire.diloco(m, sgd(m), fragments=2 if rank == 1 else 1),
    "outer optimizer": lambda m, rank: gradwire.diloco(m, sgd(m), outer=_outer(0.5 + rank // 2)),
    "architecture": lambda m, rank: gradwire.decentralized(
        m, sgd(m), graph="complete" if rank == 1 else "ring"
    ),
    "tensors": lambda m, rank: gradwire.local_sgd(m, sgd(m)),
}


def run(rank: int, folder: Path) -> Any:
    different = {}
    for name, make in DIFFERENT.items():
        model = make_model(20 if name == "tensors" and rank == 2 else 16)
        different[name] = _error_of(lambda: make(model, rank))  # noqa: B023
    return {"different": different, "killed": _killed(rank)}


def _killed(rank: int) -> Any:
    """Rank 1 is killed; each context has a process group of its own."""
    contexts = {}
    for name, make in (
        ("local_sgd", gradwire.local_sgd),
        ("delayed", gradwire.diloco),
        ("decentralized", gradwire.decentralized),
        ("closing", gradwire.decentralized),
    ):
        model = make_model()
        optimizer = sgd(model)
        options: dict[str, Any] = {"delay": 1, "fragments": 2} if name == "delayed" else {}
        group = dist.new_group(list(range(SIZE)))
        context = make(model, optimizer, period=2, process_group=group, timeout_s=60, **options)
        contexts[name] = (model, optimizer, context)
        _steps(model, optimizer, rank, 3)
    if rank == 1:
        os._exit(7)
    return {
        # Messages of the first round may be there already, and in the second one some do not
        # receive from the lost rank.
        name: _error_of(
            context.close  # serves the lost rank
            if name == "closing"
            else lambda: _steps(model, optimizer, rank, 6)  # noqa: B023
        )
        for name, (model, optimizer, context) in contexts.items()
    }


def _steps(model: nn.Module, optimizer: Any, rank: int, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def _error_of(call: Callable[[], Any]) -> list[Any]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return ["", "", 0.0]
