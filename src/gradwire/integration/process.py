"""The functions with which a script of Horovod or BytePS begins; also names that it uses."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

Average, Sum = "average", "sum"


class Compression:
    """The compressions of Horovod, by their names there. Any expression of gradwire will do."""

    none = "identity"
    fp16 = "fp16"


def init(backend: str | None = None) -> None:
    """Starts torch.distributed, if it is not yet, from what torchrun or gradwire launch has set."""
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not set: start the script with torchrun, for example "
            "torchrun --nproc-per-node 2 train.py"
        )
    dist.init_process_group(backend or "gloo")


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", dist.get_rank()))


def local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def allreduce(tensor: Tensor, name: str | None = None, op: str = Average) -> Tensor:
    """The mean, or the sum, over all ranks, as a new tensor."""
    if op not in (Average, Sum):
        raise ValueError(f"op is Average or Sum, got {op!r}")
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total if op == Sum else total.div_(size()).to(tensor.dtype)


def push_pull(tensor: Tensor, name: str | None = None, average: bool = True) -> Tensor:
    """BytePS's name of `allreduce`."""
    return allreduce(tensor, name, Average if average else Sum)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor]], root_rank: int = 0
) -> None:
    """All ranks get the values of one: of `model.state_dict()` or `model.named_parameters()`."""
    items = params.items() if isinstance(params, Mapping) else params
    own = [(name, value) for name, value in items if isinstance(value, Tensor)]
    described = [[name, list(value.shape), str(value.dtype)] for name, value in own]
    _refuse_everywhere(_difference(described, _broadcast_json(described, root_rank), root_rank))
    for _, value in own:
        dist.broadcast(value.detach(), root_rank)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """All ranks get the state and the settings of one rank's optimizer."""
    tensors: list[Tensor] = []
    described = _describe(optimizer.state_dict(), tensors) if rank() == root_rank else None
    described = _broadcast_json(described, root_rank)
    received: list[Tensor] = []
    state = _rebuild(described, tensors if rank() == root_rank else None, received, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def _difference(own: list[Any], expected: list[Any], root: int) -> str:
    """What differs between this rank's tensors and those of another; "" if nothing."""
    for mine, theirs in zip(own, expected):
        if mine != theirs:
            return f"rank {rank()} has {mine}, rank {root} has {theirs}"
    if len(own) != len(expected):
        return f"rank {rank()} has {len(own)} tensors, rank {root} has {len(expected)}"
    return ""


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """A tree of plain values; its tensors go into the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, Mapping):
        return {"map": [[key, _describe(own, tensors)] for key, own in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_describe(own, tensors) for own in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise ValueError(
        f"the optimizer's state has {value!r}, which is neither a tensor nor a plain value: load "
        "it on every rank instead"
    )


def _rebuild(row: Any, own: list[Tensor] | None, received: list[Tensor], root: int) -> Any:
    """The tree that was described; its tensors are broadcast in order."""
    ((kind, value),) = row.items()
    if kind == "tensor":
        shape, dtype = value
        if own is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=_device())
        else:
            tensor = own[len(received)].detach().to(_device()).contiguous()
        received.append(tensor)
        dist.broadcast(tensor, root)
        return tensor
    if kind == "map":
        return {key: _rebuild(item, own, received, root) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_rebuild(item, own, received, root) for item in value]
        return items if kind == "list" else tuple(items)
    return value


def _broadcast_json(value: Any, root: int) -> Any:
    """A plain value of one rank, on all."""
    packed = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([packed.numel()], device=_device())
    dist.broadcast(length, root)
    if rank() == root:
        packed = packed.to(_device())
    else:
        packed = torch.empty(int(length), dtype=torch.uint8, device=_device())
    dist.broadcast(packed, root)
    return json.loads(bytes(packed.cpu().numpy()))


def _device() -> torch.device:
    """Where a tensor must lie that the process group sends."""
    is_nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _refuse_everywhere(problem: str) -> None:
    """Raises on all ranks if one of them has a problem."""
    problems = [_broadcast_json(problem, root) for root in range(size())]
    found = next((one for one in problems if one), None)
    if found is not None:
        raise ValueError(f"{found}: all ranks need the same model")
