"""What a rank takes of the machine it runs on, and how a lost one is told."""

import os
import re

import torch
import torch.distributed as dist

from gradwire.core.errors import PeerLost
from gradwire.experiment.config import Config


def default_threads(num_ranks: int) -> int:
    """CPU threads of each rank, where this machine has so many of them."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // max(1, local))


def own_device(config: Config) -> torch.device | None:
    """The accelerator of this rank: the one of its number on this machine."""
    if not config.device.startswith("cuda") or not torch.cuda.is_available():
        return None
    if config.device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        torch.cuda.set_device(local % torch.cuda.device_count())
    return torch.empty(0, device=config.device).device


def why_lost(error: PeerLost) -> str:
    """Without where in its source gloo noticed it, and its good wishes."""
    known = f"rank {error.rank}: "
    notes: list[str] = getattr(error, "__notes__", [])
    why = next((note.removeprefix(known) for note in notes if note.startswith(known)), "")
    why = re.sub(r"^\[[^]]*\.cc:\d+\]\s*", "", why).partition(". This is typically")[0]
    return f"rank {error.rank} was lost" + (f" ({why})" if why else "")
