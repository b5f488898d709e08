"""Ranks that fail under a hook or an optimizer: each writes what the others got."""

import os
import signal
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def different_first_layers(rank: int, folder: Path) -> Any:
    """The first buckets that leave are the same."""
    width = 3 if rank == 2 else 4
    model = nn.Sequential(nn.Linear(width, 5), nn.Linear(5, 4))
    return _trained_alike(model, width, scheduling="wfbp")


def more_layers(rank: int, folder: Path) -> Any:
    """The last parameters have the same names and shapes."""
    layers = [nn.Linear(4, 4) for _ in range(3 if rank == 1 else 2)]
    names = [f"layer {number}" for number in range(len(layers))][::-1]
    model = nn.ModuleDict(dict(zip(names, layers)))
    sequence = nn.Sequential(*model.values())
    named = list(model.named_parameters())
    return _trained_alike(sequence, 4, named, scheduling="wfbp")


def different_operations(rank: int, folder: Path) -> Any:
    op = gradwire.Sum if rank == 1 else gradwire.Average
    return _trained_alike(nn.Linear(4, 2), 4, op=op)


def _trained_alike(model: nn.Module, width: int, named: Any = None, **options: Any) -> Any:
    optimizer = gradwire.DistributedOptimizer(
        sgd(model), named or model.named_parameters(), timeout_s=60, **options
    )

    def run() -> None:
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()

    return _error_of(run)


def _in_own_order(rank: int) -> nn.Module:
    """Rank 1 has two layers of one shape in another order; the first bucket to leave is equal."""
    names = ("b", "a", "c") if rank == 1 else ("a", "b", "c")
    layers = {name: nn.Linear(12, 12) for name in names}
    return nn.Sequential(OrderedDict(**layers, head=nn.Linear(12, 4)))


def another_order_of_hook(rank: int, folder: Path) -> Any:
    # Else all parameters are in one bucket at first.
    options: dict[str, Any] = {"has_names": True, "find_unused_parameters": True}
    model, _ = ddp(_in_own_order(rank), "ef(topk(0.1))", **options)
    return _error_of(lambda: loss_of(model, rank, 0).backward())


def another_order_of_optimizer(rank: int, folder: Path) -> Any:
    return _trained_alike(_in_own_order(rank), 12, compression="ef(topk(0.1))", scheduling="wfbp")


def one_hook_for_two_models(rank: int, folder: Path) -> Any:
    models = DistributedDataParallel(make_model()), DistributedDataParallel(make_model(20))
    hook = gradwire.ddp_comm_hook("ef(topk(0.2))", timeout_s=60)
    for model in models:
        model.register_comm_hook(*hook)
    return _error_of(lambda: sum(loss_of(model, rank, 0) for model in models).backward())


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


def killed_before_all_reduces_of_hook(rank: int, folder: Path) -> Any:
    return _killed_under_identity(rank, _with_hook, is_within=False)


def killed_within_all_reduces_of_hook(rank: int, folder: Path) -> Any:
    return _killed_under_identity(rank, _with_hook, is_within=True)


def killed_before_all_reduces_of_optimizer(rank: int, folder: Path) -> Any:
    return _killed_under_identity(rank, _with_optimizer, is_within=False)


def killed_within_all_reduces_of_optimizer(rank: int, folder: Path) -> Any:
    return _killed_under_identity(rank, _with_optimizer, is_within=True)


def _killed_under_identity(rank: int, make: Any, *, is_within: bool) -> Any:
    """Within: in the backward pass, when the first of several all-reduces have begun."""
    inner = make_model()
    model, optimizer = make(inner)
    train(model, optimizer, range(2), rank)
    if rank == 1 and is_within:
        inner[0].weight.register_hook(_kill)
    elif rank == 1:
        _kill()
    return _error_of(lambda: loss_of(model, rank, 2).backward())


def _with_hook(inner: nn.Module) -> Any:
    model, _ = ddp(inner, "identity")
    return model, sgd(model)


def _with_optimizer(inner: nn.Module) -> Any:
    return inner, gradwire.DistributedOptimizer(
        sgd(inner), inner.named_parameters(), "identity", scheduling="wfbp", timeout_s=60
    )


def _kill(grad: torch.Tensor | None = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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


class _Failing:
    """A compressor of the user's own, which raises on rank 1 after two steps."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if self.rank == 1 and self.step == 2:
            raise ArithmeticError("something is wrong here")
        return tensor, None

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor


def compressor_raises(rank: int, folder: Path) -> Any:
    """Rank 1 catches its error and lives on."""
    found = {}
    for use in ("hook", "optimizer"):
        compressor, inner = _Failing(rank), make_model()
        if use == "hook":
            model, _ = ddp(inner, compressor)
            optimizer: Any = sgd(model)
        else:
            model = inner
            optimizer = gradwire.DistributedOptimizer(
                sgd(model), model.named_parameters(), compressor, scheduling="wfbp", timeout_s=60
            )
        train(model, optimizer, range(2), rank)
        compressor.step = 2
        found[use] = _error_of(lambda: loss_of(model, rank, 2).backward())  # noqa: B023
        dist.barrier()
    return found


def _fail(grad: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("something is wrong here")
