"""What the page shows, as one object of JSON. What it is made of is computed in the page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradwire
from gradwire.experiment.report.comparison import counted_headers
from gradwire.experiment.report.drawing import COLOURS
from gradwire.experiment.report.page.courses import courses_of, short
from gradwire.experiment.report.page.found import Found, find_runs
from gradwire.experiment.report.page.methods import Method, Task, tasks_of
from gradwire.experiment.report.page.timelines import LANES, timeline_of
from gradwire.experiment.report.score import has_spread, score_value
from gradwire.experiment.run.record import Row
from gradwire.experiment.studies.compare import FP16, FP32
from gradwire.experiment.timeline.chart import COLOURS as SPAN_COLOURS

_LOWER = ("loss", "perplexity", "error", "mse", "mae", "rmse")  # words in names of metrics


def content(folders: Sequence[Path]) -> Row:
    """Everything about the runs in these folders."""
    runs, num_unfinished = find_runs(folders)
    tasks = tasks_of(runs)
    return {
        "gradwire": gradwire.__version__,
        "colours": COLOURS,
        "span_colours": SPAN_COLOURS,
        "lanes": LANES,
        "unfinished": num_unfinished,
        "tasks": [_task(task) for task in tasks],
    }


def _task(task: Task) -> Row:
    words = task.score.lower().replace("_", " ").split()
    return {
        "name": task.name,
        "score": task.score,
        "lower_is_better": any(word in words for word in _LOWER),
        "shared": {name: _text(value) for name, value in task.shared.items()},
        "methods": [_method(task, method) for method in task.methods],
    }


def _method(task: Task, method: Method) -> Row:
    ratios: Row = {}
    for name, compression in (("fp32", FP32), ("fp16", FP16)):
        ratio, base = task.ratio(method, compression)
        ratios |= {f"ratio_{name}": short(ratio), f"base_{name}": base}
    return {
        "name": method.name,
        "settings": {name: _text(value) for name, value in task.varied(method).items()},
        "workers": method.settings["workers"],
        "is_fp32": (method.settings["compression"], method.settings["synchronization"])
        == (FP32, "bsp"),
        **ratios,
        "runs": [_run(run) for run in method.done],
        "failures": method.failures,
        "failed": [
            {"seed": run.row["seed"], "folder": str(run.folder), "why": run.failure}
            for run in method.runs
            if run.failure
        ],
        "notes": _notes(method),
        "timeline": None
        if method.recording is None
        else {"folder": str(method.recording.folder), **timeline_of(method.recording.folder)},
        "config": str(method.done[0].folder / "config.toml") if method.done else "",
    }


def _run(run: Found) -> Row:
    summary = run.summary
    worker_steps = run.row["workers"] * summary["steps"]
    return {
        "seed": run.row["seed"],
        "folder": str(run.folder),
        "engine": run.row["engine"],
        "score": short(score_value(summary)),
        "bytes_per_worker_step": short(summary["bytes_per_worker_step"]),
        "by_tensor": {
            name: short(count / worker_steps) for name, count in summary["bytes_by_tensor"].items()
        },
        "wall_time_s": short(summary["wall_time_s"]),
        "training_time_s": short(summary.get("training_time_s")),
        "versions": summary["versions"],
        "kernels": summary["kernels"],
        "courses": courses_of(run.records),
    }


def _notes(method: Method) -> list[str]:
    """What is to be said about its figures."""
    if not method.done:
        return []
    notes = []
    dropped = sum(run.summary["dropped_steps"] for run in method.done)
    if dropped:
        notes.append(f"dropped {dropped} steps because of NaN or infinity")
    if any(has_spread(run.summary) for run in method.done):
        notes.append("is shown with the mean over the workers' own models")
    headers = counted_headers(method.settings["architecture"])
    return [*notes, *([f"has {headers}"] if headers else [])]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value) if value != "" else "default"
