"""Ranks that fail under a hook or an optimizer: each writes what the others got."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradwire
from integration.loops import ddp, loss_of, make_model, sgd, train

SIZE = 3


def _error_of(call: Any) -> list[Any]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", ()))
        return [type(error).__name__, f"{error} {notes}", time.monotonic() - began]
    return ["", "", 0.0]


def different_compressions(rank: int, folder: Path) -> Any:
    model, _ = ddp(make_model(), "ef(sign)" if rank == 1 else "ef(topk(0.1))")
    return _error_of(lambda: train(model, sgd(model), range(2), rank))


def different_models(rank: int, folder: Path) -> Any:
    model = make_model(16 if rank == 1 else 20)
    optimizer = gradwire.DistributedOptimizer(
        sgd(model), model.named_parameters(), "ef(sign)", timeout_s=60
    )
    return _error_of(lambda: train(model, optimizer, range(2), rank))


def fewer_parameters(rank: int, folder: Path) -> Any:
    model = make_model()
    if rank == 2:
        model = nn.Sequential(*list(model)[:-1])
    return _error_of(lambda: gradwire.broadcast_parameters(model.state_dict()))


def killed(rank: int, folder: Path) -> Any:
    model, _ = ddp(make_model(), "ef(topk(0.1))")
    optimizer = sgd(model)
    train(model, optimizer, range(2), rank)
    if rank == 1:
        os._exit(7)
    return _error_of(lambda: loss_of(model, rank, 2).backward())


def raised(rank: int, folder: Path) -> Any:
    """One rank fails in its own code, and does not end."""
    model = make_model()
    optimizer = gradwire.DistributedOptimizer(
        sgd(model), model.named_parameters(), "ef(topk(0.1))", timeout_s=60
    )
    train(model, optimizer, range(2), rank)

    def fails() -> None:
        if rank == 1:
            model[0].weight.register_hook(_fail)
        loss_of(model, rank, 2).backward()

    found = _error_of(fails)
    if rank == 1:
        os._exit(0)
    return found


def _fail(grad: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("something is wrong here")
