"""What the ranks of the test of recorded experiments run."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.experiment.processes import ranks as processes

SIZE = 3
_SETTINGS: dict[str, Any] = {
    "data": "digits",
    "workers": SIZE,
    "steps": 12,
    "eval_every": 4,
    "record_order": True,
}


def run(rank: int, folder: Path) -> list[float]:
    """Runs experiments; the last one twice, the second time from the middle on."""
    with pytest.raises(ValueError, match="give a folder"):
        processes.run(**_SETTINGS)
    gossip = processes.run(
        out=folder / "gossip",
        synchronization="asp",
        architecture="gossip(ring, adpsgd)",
        **_SETTINGS,
    )
    delayed = processes.run(
        out=folder / "delayed", synchronization="diloco(4, delay=2)", **_SETTINGS
    )
    overlapped = processes.run(
        out=folder / "overlapped",
        scheduling="dear(1000)",
        optimizer="sgd(0.1, momentum=0.9)",
        **_SETTINGS,
    )
    whole = processes.run(
        out=folder / "resumed",
        compression="ef(topk(0.1))",
        scheduling="priority(1000, credit=3000)",
        **_SETTINGS,
    )
    dist.barrier()
    (folder / "resumed" / "checkpoints" / "step-000012" / f"rank-{rank}.pt").unlink()
    dist.barrier()
    again = processes.run(resume=folder / "resumed")
    assert again.accuracy == whole.accuracy
    return [gossip.accuracy, delayed.accuracy, overlapped.accuracy, again.accuracy]
