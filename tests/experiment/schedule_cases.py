"""What the ranks of test_measured_schedule.py run, one after the other in one process group."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import gradwire
from gradwire.experiment.processes.node import schedule
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
    return {
        "priority": priority.config.scheduling,
        "mgwfbp": [run.config.scheduling for run in (merged, restarted, resumed)],
        "bytes_sent": merged.summary["bytes_sent"],
        "calls": sorted(merged.summary["call_time_s"]),
        "profiles": [
            [profile.forward_s, profile.backward_s, profile.prices] for profile in profiles
        ],
    }
