"""Jobs with servers in which something fails: each worker writes what it got."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from integration.failure_cases import _error_of
from integration.loops import loss_of, make_model, sgd, train
from integration.served_cases import PS, distributed
from integration.serving import kill

SIZE, NUM_SERVERS = 3, 2


def different_compressions(rank: int, folder: Path) -> Any:
    model = make_model()
    optimizer = distributed(model, "ef(sign)" if rank == 1 else "ef(topk(0.1))")
    return _error_of(lambda: train(model, optimizer, range(2), rank))


def different_models(rank: int, folder: Path) -> Any:
    model = make_model(16 if rank == 1 else 20)
    optimizer = distributed(model, "ef(sign)", synchronization="asp")
    return _error_of(lambda: train(model, optimizer, range(2), rank))


def different_rules(rank: int, folder: Path) -> Any:
    model = make_model()
    optimizer = distributed(model, synchronization="asp" if rank == 2 else "bsp")
    return _error_of(lambda: _steps(model, optimizer, rank, range(2)))


def killed(rank: int, folder: Path) -> Any:
    model = make_model()
    optimizer = distributed(model, "ef(topk(0.1))")
    _steps(model, optimizer, rank, range(2))
    if rank == 1:
        os._exit(7)
    return _error_of(lambda: _steps(model, optimizer, rank, range(2, 4)))


def raised(rank: int, folder: Path) -> Any:
    """One worker fails in its own code, and ends as Python does then."""
    model = make_model()
    optimizer = distributed(model, "ef(topk(0.1))")
    _steps(model, optimizer, rank, range(2))
    if rank == 1:
        return ["", "", 0.0]  # its end closes everything
    return _error_of(lambda: _steps(model, optimizer, rank, range(2, 4)))


def server_killed(rank: int, folder: Path) -> Any:
    model = make_model()
    optimizer = distributed(model)
    _steps(model, optimizer, rank, range(2))
    dist.barrier()
    if rank == 0:
        kill(folder, SIZE + 1)
    return _error_of(lambda: _steps(model, optimizer, rank, range(2, 10**6)))


def killed_without_means(rank: int, folder: Path) -> Any:
    """With servers that hold the model the others continue."""
    model = make_model()
    optimizer = distributed(model, "ef(topk(0.1))", synchronization="ssp(1)")
    _steps(model, optimizer, rank, range(2))
    if rank == 1:
        os._exit(7)
    return _error_of(lambda: _steps(model, optimizer, rank, range(2, 8)))


def not_finite(rank: int, folder: Path) -> Any:
    """A worker whose update is NaN gets an error; the others continue."""
    model = make_model()
    optimizer = distributed(model, synchronization="asp")
    _steps(model, optimizer, rank, range(2))

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model, rank, 2)
        (loss * float("nan") if rank == 1 else loss).backward()
        optimizer.step()

    return _error_of(step)


def _steps(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def without_launch() -> str:
    with torch.random.fork_rng():
        model = make_model()
    try:
        gradwire.DistributedOptimizer(sgd(model), model.named_parameters(), architecture=PS)
    except RuntimeError as error:
        return str(error)
    return ""
