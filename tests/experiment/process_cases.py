"""What the ranks of test_processes.py run, one after the other in one process group."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import gradwire
from gradwire.core.errors import GradwireWarning, LostError
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.experiment.processes.node.coordinator import Coordinator
from gradwire.experiment.processes.state.checkpoints import Checkpoints

SIZE = 3
SLOW_S = 0.2  # for a file
_SKIPPED = r"rank 1: .*/rank-1\.pt is damaged: .*; it is not used"
TINY: dict[str, Any] = {
    "workers": SIZE,
    "model": "mlp((8,))",
    "batch_size": 4,
    "steps": 20,
    "eval_every": 4,
    "threads": 1,
    "evaluation": "sequential",  # batched products of tiny matrices have bits of their own
}
CASES: dict[str, dict[str, Any]] = {
    "feedback": {
        "compression": "ef(topk(0.1))",
        "optimizer": "sgd(0.1, momentum=0.9)",
        "momentum_at": "after",
    },
    "rounds": {
        "synchronization": "localsgd(3)",
        "architecture": "ring",
        "compression": "qsgd(4)",
        "scheduling": 'sequential("layer")',
    },
    # Rank 0 does not always have the newest model.
    "clients": {"synchronization": "fedavg(0.7)", "batch_size": 96},
    "gossip": {"architecture": "gossip(ring, choco(0.3))", "compression": "topk(0.3)"},
    "dropping": {"optimizer": "sgd(1e30)", "nonfinite": "skip"},
    "overlap": {
        "scheduling": "wfbp",
        "compression": "ef(topk(0.1))",
        "optimizer": "sgd(0.1, momentum=0.9)",
        "momentum_at": "before",
    },
    "merged": {"scheduling": "mgwfbp(groups=(1,))", "compression": "ef(sign)"},
    "partitions": {
        "scheduling": "priority(400, credit=800, merge=0)",
        "compression": "fp16",
        "optimizer": "adam(0.01)",
        "layer_times": "given((1.0, 1.0), backward=(2.0, 2.0))",
    },
    "two halves": {"scheduling": "dear(400)", "optimizer": "sgd(0.1, momentum=0.9)"},
    "local overlap": {"scheduling": "fusion(800, first=400)", "synchronization": "localsgd(3)"},
}


def run(rank: int, folder: Path) -> Any:
    """The cases with their records, and what goes wrong in all the ways there are."""
    for name, settings in CASES.items():
        gradwire.run(out=folder / name, **TINY | settings)
    return {
        "asynchronous": _asynchronous(folder),
        "slow": _slow(),
        "interrupted": _interrupted(rank, folder),
        "crashed": _crashed(rank, folder),
        "slow disk": _slow_disk(rank, folder),
        "refused": _refused(rank, folder),
    }


def _asynchronous(folder: Path) -> Any:
    settings = {"synchronization": "asp", "architecture": "gossip(ring, adpsgd)"}
    run = gradwire.run(out=folder / "asynchronous", **TINY, **settings)
    return {"steps": [row["step"] for row in run.metrics], "distance": run.summary["distance"]}


def _slow() -> Any:
    """Rank 0 takes longer over an evaluation than nothing may happen in a step."""

    def progress(row: Any, steps: int) -> None:
        time.sleep(5)

    run = gradwire.run(timeout="4s", progress=progress, **TINY | {"steps": 4})
    return [row["step"] for row in run.metrics]


def _interrupted(rank: int, folder: Path) -> Any:
    """Signals end it twice, one checkpoint is damaged: it goes on to the same bits."""
    place, told = folder / "interrupted", []
    new: dict[str, Any] = {"out": place, **TINY, **CASES["feedback"]}
    for limit, settings in ((4, new), (12, {"resume": place})):
        signals = Signals()

        def progress(row: Any, steps: int, signals: Signals = signals, limit: int = limit) -> None:
            if row["step"] >= limit:
                signals.wanted = 15

        with signals.waiting():
            try:
                gradwire.run(progress=progress, signals=signals, **settings)
            except Interrupted as stop:
                told.append([stop.number, str(stop)])
        dist.barrier()
        found = sorted(place.glob("checkpoints/*/rank-1.pt"))
        if limit == 12 and rank == 1:
            found[-1].write_bytes(found[-1].read_bytes()[:-100])
        dist.barrier()
    with pytest.warns(GradwireWarning, match=_SKIPPED) if rank == 0 else nullcontext():
        run = gradwire.run(resume=place)
    return {"told": told, "steps": [row["step"] for row in run.metrics]}


def _crashed(rank: int, folder: Path) -> Any:
    """An evaluation fails, and the run goes on from the checkpoint before it."""
    place = folder / "crashed"

    def progress(row: Any, steps: int) -> None:
        if row["step"] == 8:
            raise ArithmeticError

    with pytest.raises(ArithmeticError if rank == 0 else LostError):
        gradwire.run(out=place, progress=progress, **TINY, **CASES["feedback"])
    dist.barrier()
    saved = [path.name for path in place.glob("checkpoints/step-*")]
    dist.barrier()
    told: list[int] = []
    gradwire.run(resume=place, progress=lambda row, steps: told.append(row["step"]))
    return {"saved": sorted(saved), "told": told}


def _slow_disk(rank: int, folder: Path) -> Any:
    """How long checkpoints took, as who decides on the next one hears it."""
    took_s: list[float] = []
    write = Checkpoints.write

    def slowly(self: Checkpoints, step: int, state: dict[str, Any]) -> None:
        time.sleep(SLOW_S if rank == 1 else 0.0)
        write(self, step, state)

    def note_checkpoint(self: Coordinator, seconds: float) -> None:
        took_s.append(seconds)

    with (
        patch.object(Checkpoints, "write", slowly),
        patch.object(Coordinator, "note_checkpoint", note_checkpoint),
    ):
        gradwire.run(out=folder / "slow disk", **TINY | {"steps": 8})
    return took_s


def _refused(rank: int, folder: Path) -> Any:
    def attempt(**settings: Any) -> str:
        with pytest.raises(ValueError, match=r"\w") as caught:
            gradwire.run(**TINY | settings)
        return str(caught.value)

    wrong = {1: {"batch_size": 5, "seed": 3}, 2: {"seed": 7}}.get(rank, {})
    return {
        "simulated": attempt(bandwidth="1Mbit", faults=("crash(1, at=1.0)",)),
        "different": attempt(**wrong),
        "only one": attempt(data="nowhere" if rank == 1 else "digits"),
        "there": attempt(out=folder / "feedback"),
        "ranks": attempt(workers=2),
        "servers": attempt(architecture="parameter_server(2)"),
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
