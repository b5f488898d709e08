"""A folder of small runs, as a sweep leaves it, for the tests of the page."""

import json
from pathlib import Path
from typing import Any

import gradwire

SMALL: dict[str, Any] = {
    "steps": 12,
    "batch_size": 16,
    "model": "mlp((8,))",
    "compute": "fixed(0.001)",
    "optimizer": "sgd(0.5)",
    "eval_every": 2,
    "scheduling": "wfbp",
    "bandwidth": "100Mbit",
    "what_if": ("10Mbit", "1Gbit"),
    "threads": 1,
}
METHODS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"compression": "fp16"},
    "largest 5%": {"compression": "ef(topk(0.05))"},
    "local <steps>": {"synchronization": "localsgd(3)"},
}
SEEDS = (0, 1)


def make_runs(folder: Path) -> Path:
    """Two seeds of four methods, with their names, and spans of one of them."""
    lines = []
    for name, settings in METHODS.items():
        for seed in SEEDS:
            own = f"run-{len(lines)}"
            gradwire.simulate(out=folder / "runs" / own, seed=seed, **SMALL | settings)
            lines.append(json.dumps({"folder": own, "method": name}))
    (folder / "results.jsonl").write_text("\n".join(lines) + "\n")
    short: dict[str, Any] = {"steps": 4, "what_if": (), "record_spans": True}
    gradwire.simulate(out=folder / "spans", seed=0, **SMALL | short)
    return folder
