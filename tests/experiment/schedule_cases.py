"""What the ranks of test_measured_schedule.py run, one after the other in one process group."""

from pathlib import Path
from signal import SIGTERM
from typing import Any
from unittest.mock import patch

import pytest
import torch

import gradwire
from gradwire.experiment.processes.launch.signals import Interrupted
from gradwire.experiment.processes.node import schedule
from gradwire.experiment.processes.node.drift import Drift
from gradwire.experiment.processes.node.run import NodeRun
from gradwire.scheduling import mgwfbp

SIZE = 2
TINY: dict[str, Any] = {
    "workers": SIZE,
    "model": "mlp((8,))",
    "batch_size": 4,
    "steps": 6,
    "eval_every": 3,
    "threads": 1,
    "evaluation": "sequential",
    "compression": "ef(topk(0.1))",
}


LONGER = {**TINY, "steps": 9}


def _run_with_drift(folder: Path, signal_at: int | None = None) -> Any:
    """A run in which the first look at step times says that they have changed."""
    notes: list[int] = []  # of the coordinator

    def note(drift: Drift, step_s: float, num_steps: int) -> bool:
        notes.append(num_steps)
        return sum(num > 0 for num in notes) == 1

    def groups(tensors: Any, profile: Any) -> list[int]:
        return [2] if any(notes) else [1]

    def step_finished(node: NodeRun, rank: int, step: int, *others: Any) -> None:
        finished(node, rank, step, *others)
        if step + 1 == signal_at:
            node.signals.wanted = SIGTERM

    finished = NodeRun.step_finished
    with (
        patch.object(mgwfbp, "merged_groups", groups),
        patch.object(Drift, "note", note),
        patch.object(NodeRun, "step_finished", step_finished),
    ):
        return gradwire.run(scheduling="mgwfbp", out=folder, **LONGER)


def run(rank: int, folder: Path) -> Any:
    profiles = []

    def seen(*arguments: Any) -> Any:
        profiles.append(made(*arguments))
        return profiles[-1]

    made = schedule.make_profile
    with patch.object(schedule, "make_profile", seen):
        priority = gradwire.run(scheduling="priority", out=folder / "priority", **TINY)
    # Were ranks to decide for themselves, each would have other groups.
    with patch.object(mgwfbp, "merged_groups", lambda tensors, profile: [1 + rank]):
        merged = gradwire.run(scheduling="mgwfbp", out=folder / "mgwfbp", **TINY)
    with patch.object(mgwfbp, "merged_groups", lambda tensors, profile: [3]):
        restarted = gradwire.run(
            scheduling="mgwfbp", out=folder / "mgwfbp", is_restart=True, **TINY
        )
        resumed = gradwire.run(resume=folder / "mgwfbp")
    drifted = _run_with_drift(folder / "drifted")
    with pytest.raises(Interrupted):
        _run_with_drift(folder / "interrupted", signal_at=5)
    continued = gradwire.run(resume=folder / "interrupted")
    return {
        "drifted": [drifted.summary["schedules"], continued.summary["schedules"]],
        "is_same": torch.equal(drifted.params, continued.params),
        "priority": priority.config.scheduling,
        "mgwfbp": [run.config.scheduling for run in (merged, restarted, resumed)],
        "bytes_sent": merged.summary["bytes_sent"],
        "calls": sorted(merged.summary["call_time_s"]),
        "profiles": [
            [profile.forward_s, profile.backward_s, profile.prices] for profile in profiles
        ],
    }
