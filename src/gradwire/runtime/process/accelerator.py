"""Tensors on accelerators, on their way to other processes.

Over gloo they go through page-locked host memory. The copies run on their own streams: a message is
sent when the event of its copy has fired, while others are still being copied; a message that
arrives is copied while the next is received, and its reader waits for the event, on the
accelerator.

Over nccl the payload goes from accelerator to accelerator, and only its frame through gloo. Two
ranks that send to each other at the same time would block one another in one communicator, whose
operations run one after the other. So there are two: payloads to higher ranks, and to lower ones.
"""

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.runtime.process.transport import Arrival


def device_of_rank(name: str) -> torch.device:
    """The device that a configuration names, for this process: "cuda" is the one of its rank.

    Ranks of one machine take turns, by `LOCAL_RANK` as torchrun sets it.
    """
    if name != "cuda":
        return torch.device(name)
    rank = dist.get_rank() if dist.is_initialized() else 0
    local = int(os.environ.get("LOCAL_RANK", rank))
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class PayloadGroups(NamedTuple):
    """The process groups for payloads on devices of this type."""

    up: dist.ProcessGroup  # to higher ranks
    down: dist.ProcessGroup  # to lower ranks
    device_type: str = "cuda"


def nccl_groups(device: torch.device | None) -> PayloadGroups | None:
    """Groups for payloads, if this rank has an accelerator that nccl serves. All ranks call it.

    None if the default process group has no nccl, or if ranks share an accelerator, which nccl
    refuses.
    """
    can = device is not None and device.type == "cuda" and has_nccl()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    can = can and local <= torch.cuda.device_count()
    # Machines may differ, and either all ranks make groups or none.
    all_can = torch.tensor(int(can))
    dist.all_reduce(all_can, op=dist.ReduceOp.MIN)
    if not int(all_can):
        return None
    return PayloadGroups(dist.new_group(backend="nccl"), dist.new_group(backend="nccl"))


def has_nccl() -> bool:
    """Whether the default process group has nccl for accelerators."""
    if not dist.is_nccl_available():
        return False
    return "nccl" in str(dist.get_backend_config())


class HostCopy:
    """A tensor that is being copied to the host."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self.tensor = tensor  # kept: it is read while it is copied
        flat = tensor.detach().contiguous()
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        self.copy = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            self.copy.copy_(flat, non_blocking=True)
            flat.record_stream(stream)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> Tensor:
        """Waits for the copy and returns it."""
        self._event.synchronize()
        return self.copy


class DeviceCopy:
    """A payload that is being copied to an accelerator, or received there."""

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self.tensor = tensor
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        """Orders the caller's later work on the accelerator after the copy."""
        stream = torch.cuda.current_stream(self.tensor.device)
        self._event.wait(stream)
        self.tensor.record_stream(stream)


class CopiedArrival(NamedTuple):
    """An arrival whose tensor is still being copied to the accelerator."""

    arrival: Arrival
    copy: DeviceCopy


class Outgoing(NamedTuple):
    """A message that is posted when its tensor has come from the accelerator."""

    dst: int
    job: int
    tag: int
    message: Any
    copy: HostCopy | None  # None: it needs none, but waits behind others
