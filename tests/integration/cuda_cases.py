"""What the ranks of test_cuda.py run. Nothing here may touch CUDA before the ranks are forked."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from integration.loops import batch, ddp, flat, is_same_everywhere, make_model, sgd

DEVICE = "cuda"
COMPRESSIONS = ("identity", "ef(topk(0.1))", "ef(sign)", "qsgd(bits=4)", "powersgd(1)")
STEPS = 4


def on_gloo(rank: int, folder: Path) -> Any:
    """Two ranks on one device."""
    plain, _ = ddp(_model(), None)
    _train(plain, sgd(plain), rank, _whole)
    found: dict[str, Any] = {}
    for text in COMPRESSIONS:
        model, state = ddp(_model(), text)
        is_same = _train(model, sgd(model), rank, _whole)
        found[f"hook {text}"] = [is_same, state.stats().steps, _difference(plain, model)]
        model, optimizer = _with_optimizer(text)
        is_same = _train(model, optimizer, rank, _whole)
        found[f"optimizer {text}"] = [is_same, optimizer.stats().steps, _difference(plain, model)]
    dist.barrier()  # the process ends at once: the others may still wait for what it sent
    return found


def on_nccl(rank: int, folder: Path) -> Any:
    """One rank, whose default process group is nccl."""
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/another_store",
        rank=rank,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    found: dict[str, Any] = {}
    for text in COMPRESSIONS:
        model, state = ddp(_model(), text)
        _train(model, sgd(model), rank, None)
        found[f"hook {text}"] = [_has_moved(model), state.stats().steps]
        model, optimizer = _with_optimizer(text)
        _train(model, optimizer, rank, None)
        found[f"optimizer {text}"] = [_has_moved(model), optimizer.stats().steps]
    return found


def on_replicas(rank: int, folder: Path) -> Any:
    """Two replicas of one shard each, on one device over gloo.

    "native" has the error of FSDP alone, if it does not run there.
    """
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("replicate", "shard"))
    try:
        model = _sharded(mesh)
        _train(model, sgd(model), rank, None)
    except Exception as error:
        return {"native": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {"native": ""}
    for text in COMPRESSIONS:
        model = _sharded(mesh)
        group = mesh["replicate"].get_group()
        replicas = gradwire.compress_replicas(model, group, text, timeout_s=60)
        is_same = _train(model, sgd(model), rank, _local)
        found[text] = [is_same, replicas.stats().steps]
    dist.barrier()
    return found


def _model() -> nn.Module:
    return make_model().to(DEVICE)


def _with_optimizer(text: str) -> Any:
    model = _model()
    optimizer = gradwire.DistributedOptimizer(
        sgd(model), model.named_parameters(), text, scheduling="wfbp", timeout_s=60
    )
    return model, optimizer


def _sharded(mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model: Any = _model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def _train(
    model: nn.Module, optimizer: Any, rank: int, compared: Callable[[nn.Module], Tensor] | None
) -> bool:
    """Whether all ranks had the same bits after every step, of what is compared."""
    is_same = True
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, targets = (x.to(DEVICE) for x in batch(rank, step))
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if compared is not None:
            is_same = is_same and is_same_everywhere(compared(model))
    return is_same


def _whole(model: nn.Module) -> Tensor:
    """The parameters on the host: gloo gathers there."""
    return flat(model).cpu()


def _local(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().to_local().reshape(-1).cpu() for p in model.parameters()])


def _difference(first: nn.Module, second: nn.Module) -> float:
    return float((_whole(first) - _whole(second)).abs().max())


def _has_moved(model: nn.Module) -> bool:
    return bool(flat(model).isfinite().all()) and not torch.equal(_whole(model), flat(make_model()))
