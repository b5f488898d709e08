"""What a rank uses of its machine, how many ranks there are, and how a lost one is described."""

import os
import re
from collections.abc import Callable

import torch
import torch.distributed as dist

from gradwire.architecture import ARCHITECTURE
from gradwire.core.errors import PeerLost
from gradwire.core.layout import NodeLayout
from gradwire.experiment.run.config import Config
from gradwire.runtime.process.accelerator import device_of_rank


def default_threads(num_ranks: int) -> int:
    """CPU threads of each rank, if so many ranks share this machine."""
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


def layout_of(config: Config) -> NodeLayout:
    """The nodes that a run needs: workers, servers and scheduler."""
    return ARCHITECTURE.parse(config.architecture).layout(config.workers)


def why_lost(error: PeerLost, name: Callable[[int], str] = lambda rank: f"rank {rank}") -> str:
    """The message for a lost rank, without the source lines and advice in gloo's error."""
    known = f"rank {error.rank}: "
    notes: list[str] = getattr(error, "__notes__", [])
    why = next((note.removeprefix(known) for note in notes if note.startswith(known)), "")
    why = re.sub(r"^\[[^]]*\.cc:\d+\]\s*", "", why).partition(". This is typically")[0]
    why = re.sub(r"\brank (\d+)\b", lambda match: name(int(match[1])), why)
    return f"{name(error.rank)} was lost" + (f" ({why})" if why else "")
