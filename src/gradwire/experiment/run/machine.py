"""What a rank takes of the machine it runs on, and how a lost one is described."""

import os
import re
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradwire.core.errors import PeerLost
from gradwire.experiment.run.config import Config
from gradwire.runtime.process.accelerator import device_of_rank


def default_threads(num_ranks: int) -> int:
    """CPU threads of each rank, where this machine has so many of them."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // max(1, local))


def own_device(config: Config) -> torch.device | None:
    """The accelerator of this rank, if the configuration names one that is there."""
    if not config.device.startswith("cuda") or not torch.cuda.is_available():
        return None
    return device_of_rank(config.device)


def backend_of(config: Config) -> str:
    """nccl for accelerators, if each rank of this machine can have one of its own."""
    if not config.device.startswith("cuda") or not dist.is_nccl_available():
        return "gloo"
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cpu:gloo,cuda:nccl" if num_ranks <= torch.cuda.device_count() else "gloo"


def name_of(rank: int, num_workers: int, size: int) -> str:
    """What a node is called where not all are workers; the last one is the scheduler."""
    if num_workers == size:
        return f"rank {rank}"
    if rank < num_workers:
        return f"worker {rank}"
    return "the scheduler" if rank == size - 1 else f"server {rank - num_workers}"


def why_lost(error: PeerLost, name: Callable[[int], str] = lambda rank: f"rank {rank}") -> str:
    """Without where in its source gloo noticed it, and its good wishes."""
    known = f"rank {error.rank}: "
    notes: list[str] = getattr(error, "__notes__", [])
    why = next((note.removeprefix(known) for note in notes if note.startswith(known)), "")
    why = re.sub(r"^\[[^]]*\.cc:\d+\]\s*", "", why).partition(". This is typically")[0]
    why = re.sub(r"\brank (\d+)\b", lambda match: name(int(match[1])), why)
    return f"{name(error.rank)} was lost" + (f" ({why})" if why else "")
