"""The functions with which a script of Horovod or BytePS begins: processes, and equal models."""

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradwire.experiment.processes.loops.job import complete, job_of_worker
from gradwire.integration.communicator import close_all
from gradwire.integration.described import described, rebuilt
from gradwire.integration.settings import STATE_KEY


def init(backend: str | None = None) -> None:
    """Starts torch.distributed, if it is not yet, from what torchrun or gradwire launch has set."""
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing and os.environ.get("DMLC_WORKER_ID"):
        complete(os.environ, *job_of_worker(os.environ, 1))
    elif missing:
        raise RuntimeError(
            f"{', '.join(missing)} not set: start the script with torchrun, for example "
            "torchrun --nproc-per-node 2 train.py, or with gradwire launch"
        )
    dist.init_process_group(backend or "gloo")


def shutdown() -> None:
    """Leaves the other ranks: nothing can be exchanged any more."""
    close_all()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    return dist.is_initialized()


def rank() -> int:
    _check_initialized()
    return dist.get_rank()


def size() -> int:
    _check_initialized()
    return dist.get_world_size()


def local_rank() -> int:
    """The number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", rank()))


def local_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


def cross_rank() -> int:
    """The number of this machine."""
    return int(os.environ.get("GROUP_RANK", 0))


def cross_size() -> int:
    """How many machines there are."""
    return int(os.environ.get("GROUP_WORLD_SIZE", size() // local_size()))


def nccl_built() -> bool:
    return dist.is_nccl_available()


def gloo_built() -> bool:
    return dist.is_gloo_available()


def mpi_built() -> bool:
    """No: processes are started by torchrun."""
    return False


def mpi_threads_supported() -> bool:
    return False


def _check_initialized() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialized: call gradwire.init() first, and start the "
            "script with torchrun"
        )


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor]] | Iterable[Tensor],
    root_rank: int = 0,
) -> None:
    """All ranks get the values of one: of `model.state_dict()` or `model.named_parameters()`."""
    items = params.items() if isinstance(params, Mapping) else params
    named = [
        item if isinstance(item, tuple) else (str(number), item)
        for number, item in enumerate(items)
    ]
    own = [(name, value) for name, value in named if isinstance(value, Tensor)]
    rows = [[name, list(value.shape), str(value.dtype)] for name, value in own]
    _refuse_everywhere(_difference(rows, _broadcast_json(rows, root_rank), root_rank))
    for _, value in own:
        flat = value.detach().contiguous()  # itself, but for other memory formats
        dist.broadcast(flat, root_rank)
        if flat.data_ptr() != value.data_ptr():
            value.detach().copy_(flat)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int = 0) -> None:
    """All ranks get the state and the settings of one rank's optimizer."""
    state = optimizer.state_dict()
    state.pop(STATE_KEY, None)  # what compression keeps is of this rank
    state = broadcast_object(state, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The object of one rank, on all: plain values and tensors, in lists, tuples and dicts."""
    tensors: list[Tensor] = []
    is_root = rank() == root_rank
    row: Any = None
    problem = ""
    if is_root:
        try:
            row = described(obj, tensors, name or "the object")
        except ValueError as error:
            problem = str(error)
    row, problem = _broadcast_json([row, problem], root_rank)
    if problem:  # on all ranks, so that none waits
        raise ValueError(problem)
    left, device = iter(tensors), device_of_messages()

    def next_tensor(shape: list[int], dtype: torch.dtype, was_on_cpu: bool) -> Tensor:
        if is_root:
            tensor = next(left).detach().to(device).contiguous()
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(tensor, root_rank)
        return tensor

    return rebuilt(row, next_tensor)


def _difference(own: list[Any], expected: list[Any], root: int) -> str:
    """What differs between this rank's tensors and those of another; "" if nothing."""
    for mine, theirs in zip(own, expected):
        if mine != theirs:
            return f"rank {rank()} has {mine}, rank {root} has {theirs}"
    if len(own) != len(expected):
        return f"rank {rank()} has {len(own)} tensors, rank {root} has {len(expected)}"
    return ""


def _broadcast_json(value: Any, root: int) -> Any:
    """A plain value of one rank, on all."""
    packed = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([packed.numel()], device=device_of_messages())
    dist.broadcast(length, root)
    if rank() == root:
        packed = packed.to(device_of_messages())
    else:
        packed = torch.empty(int(length), dtype=torch.uint8, device=device_of_messages())
    dist.broadcast(packed, root)
    return json.loads(bytes(packed.cpu().numpy()))


def device_of_messages() -> torch.device:
    """Where a tensor must lie that the process group sends."""
    _check_initialized()
    is_nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _refuse_everywhere(problem: str) -> None:
    """Raises on all ranks if one of them has a problem."""
    problems = [_broadcast_json(problem, root) for root in range(size())]
    found = next((one for one in problems if one), None)
    if found is not None:
        raise ValueError(f"{found}: all ranks need the same model")
