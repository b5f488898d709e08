"""What the ranks of test_fsdp.py run: two nodes of two ranks, compressed between nodes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from integration.loops import batch, make_model

SIZE = 4


def run(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {"rank": rank}
    native = _sharded(mesh)
    _train(native, range(4), rank)
    for name in ("identity", "ef(topk(0.2))", "powersgd(1)", "ef(sign)"):
        model = _sharded(mesh["shard"])
        replicas = gradwire.compress_replicas(
            model, mesh["replicate"].get_group(), name, timeout_s=60
        )
        _train(model, range(4), rank)
        difference = float((_local(model) - _local(native)).abs().max())
        stats = replicas.stats()
        found[name] = [difference, _is_same_on_replicas(model, mesh), stats.steps, stats.bytes_sent]
    found["refused"] = _refused(mesh)
    found["continued"] = _continued(mesh, rank, folder)
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def _sharded(mesh: Any) -> nn.Module:
    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _train(model: nn.Module, steps: range, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = batch(rank, step)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def _local(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().to_local().reshape(-1) for p in model.parameters()])


def _is_same_on_replicas(model: nn.Module, mesh: Any) -> bool:
    own, group = _local(model), mesh["replicate"].get_group()
    others = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(others, own, group=group)
    return all(torch.equal(other, own) for other in others)


def _refused(mesh: Any) -> str:
    try:
        gradwire.compress_replicas(make_model(), mesh["replicate"].get_group(), "ef(sign)")
    except ValueError as error:
        return str(error)
    return ""


def _continued(mesh: Any, rank: int, folder: Path) -> float:
    group = mesh["replicate"].get_group()
    whole, parts = _sharded(mesh["shard"]), _sharded(mesh["shard"])
    gradwire.compress_replicas(whole, group, "ef(topk(0.2))")
    _train(whole, range(6), rank)
    replicas = gradwire.compress_replicas(parts, group, "ef(topk(0.2))")
    _train(parts, range(3), rank)
    path = folder / f"fsdp{rank}.pt"
    torch.save(replicas.state_dict(), path)
    replicas = gradwire.compress_replicas(parts, group, "ef(topk(0.2))")
    replicas.load_state_dict(torch.load(path, weights_only=True))
    _train(parts, range(3, 6), rank)
    return float((_local(whole) - _local(parts)).abs().max())
