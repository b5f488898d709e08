"""What the ranks of test_subgroups.py run: failures among two of four ranks, and what they got."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from integration.loops import ddp, loss_of, make_model, sgd

SIZE = 4
RANKS = [1, 3]


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "notes": getattr(error, "__notes__", []),
            "seconds": time.monotonic() - began,
        }
    return {"kind": ""}


def _steps(model: nn.Module, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()


def _with_hook(group: Any, compression: str) -> Any:
    model, _ = ddp(
        make_model(), compression, hook_options={"process_group": group}, process_group=group
    )
    return model, sgd(model)


def _with_optimizer(group: Any, compression: str) -> Any:
    model = make_model()
    optimizer = gradwire.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression, process_group=group, timeout_s=60
    )
    return model, optimizer


def _different(make: Any, group: Any, rank: int) -> None:
    model, optimizer = make(group, "ef(sign)" if rank == 3 else "ef(topk(0.1))")
    _steps(model, optimizer, range(1), rank)


def _loaded_later(group: Any, rank: int) -> None:
    model, optimizer = _with_optimizer(group, "ef(topk(0.1))")
    _steps(model, optimizer, range(2), rank)
    if rank == 3:
        optimizer.load_state_dict(optimizer.state_dict())
    _steps(model, optimizer, range(2, 4), rank)


def _local_updates(group: Any, rank: int) -> None:
    model = make_model()
    gradwire.local_sgd(model, sgd(model), period=2 + rank, process_group=group, timeout_s=60)


def _nonfinite_update(group: Any, rank: int) -> None:
    model = make_model()
    optimizer = sgd(model)
    with gradwire.local_sgd(model, optimizer, period=1, process_group=group, timeout_s=60):
        if rank == 3:
            with torch.no_grad():
                next(model.parameters()).fill_(float("inf"))
        _steps(model, optimizer, range(1), rank)


def _killed(make: Any, group: Any, rank: int) -> None:
    model, optimizer = make(group, "ef(topk(0.1))")
    _steps(model, optimizer, range(2), rank)
    dist.barrier(group)  # all have received all
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    _steps(model, optimizer, range(2, 3), rank)


CASES: dict[str, Callable[[Any, int], None]] = {
    "hook": lambda group, rank: _different(_with_hook, group, rank),
    "optimizer": lambda group, rank: _different(_with_optimizer, group, rank),
    "loaded later": _loaded_later,
    "local updates": _local_updates,
    "NaN": _nonfinite_update,
    "killed": lambda group, rank: _killed(_with_hook, group, rank),
}


def run(rank: int, folder: Path) -> Any:
    """Each case in a process group of its own; the last one kills rank 3."""
    torch.set_num_threads(1)
    groups = {name: dist.new_group(RANKS) for name in CASES}
    if rank not in RANKS:
        return None
    return {name: error_of(lambda: case(groups[name], rank)) for name, case in CASES.items()}  # noqa: B023


def _replicas(rank: int, compression: str) -> Any:
    from integration.fsdp_cases import sharded

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"])
    gradwire.compress_replicas(model, mesh["replicate"].get_group(), compression, timeout_s=60)
    return model, sgd(model)


def replicas_differ(rank: int, folder: Path) -> Any:
    """Rank 3 has another compression than rank 1, which has the same shard."""
    model, optimizer = _replicas(rank, "ef(sign)" if rank == 3 else "ef(topk(0.1))")
    return error_of(lambda: _steps(model, optimizer, range(1), rank))


def replica_killed(rank: int, folder: Path) -> Any:
    model, optimizer = _replicas(rank, "ef(topk(0.1))")
    _steps(model, optimizer, range(2), rank)
    dist.barrier()  # all have received all
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: _steps(model, optimizer, range(2, 3), rank))
