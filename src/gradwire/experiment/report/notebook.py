"""Runs and sweeps in a notebook: a table and a figure, as HTML without scripts."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from gradwire.core.units import format_bytes
from gradwire.experiment.report.comparison import format_seconds, network_names
from gradwire.experiment.report.drawing import line_style, log_axis
from gradwire.experiment.report.score import format_score, score_name, score_value
from gradwire.experiment.report.sweep import sweep_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gradwire.experiment.run.config import Config
    from gradwire.experiment.run.record import Row

_SIZE = (9, 3.2)  # inches
_MAX_LINES = 16
_MAX_LETTERS = 40  # of a name in a legend


def run_html(config: Config, metrics: Sequence[Row], summary: Row) -> str:
    """The figures of a run, and its score against steps and time."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in _facts(config, summary).items()
    )
    table = f"<table>{lines}</table>"
    if not metrics:
        return table
    figure = _run_figure(config, metrics)
    name = score_name(metrics[0])
    return f"{table}{_image(figure, f'test {name} against steps and time')}"


def _facts(config: Config, summary: Row) -> dict[str, str]:
    dimensions = (
        config.compression,
        config.synchronization,
        config.architecture,
        config.scheduling,
    )
    facts = {
        "method": " | ".join(dimensions),
        "task": f"{config.model or 'default model'} on {config.data}, {config.workers} workers, "
        f"{config.steps} steps of batch {config.batch_size}, seed {config.seed}",
        f"test {score_name(summary)}": format_score(summary),
        "sent": f"{format_bytes(summary['bytes_per_worker_step'])} per worker and step, "
        f"{format_bytes(summary['bytes_sent'])} in all",
    }
    if "virtual_time_s" in summary:
        times = {config.bandwidth: summary["virtual_time_s"], **summary["virtual_times_s"]}
        facts["virtual time"] = ", ".join(
            f"{format_seconds(seconds)} at {name}"
            for name, seconds in zip(network_names(list(times)), times.values())
        )
    if "training_time_s" in summary:
        facts["measured time"] = format_seconds(summary["training_time_s"])
    return facts


def _run_figure(config: Config, metrics: Sequence[Row]) -> Figure:
    figure, (by_step, by_time) = _axes(metrics[0])
    is_virtual = "virtual_time_s" in metrics[0]
    times = [row["virtual_time_s" if is_virtual else "time_s"] for row in metrics]
    by_step.plot([row["step"] for row in metrics], _scores(metrics), **line_style(0))
    by_time.plot(times, _scores(metrics), **line_style(0))
    by_step.set_xlabel("steps")
    kind = f"virtual time at {network_names([config.bandwidth])[0]}" if is_virtual else "time"
    by_time.set_xlabel(f"{kind} [s]")
    return figure


def sweep_results_html(
    rows: Sequence[Row], table: Sequence[Row], varied: Sequence[str], runs: Path
) -> str:
    """The table of a sweep, and the mean curves of its methods, from the records in `runs`."""
    found: dict[str, list[list[Row]]] = {}
    for row in rows:
        path = runs / row["folder"] / "metrics.jsonl"
        if "failure" in row or not path.is_file():
            continue
        name = ", ".join([row["method"], *(f"{each} {row[each]}" for each in varied)])
        metrics = [json.loads(line) for line in path.read_text().splitlines()]
        sent = [{**each, "sent": each["bytes_sent"] / row["workers"]} for each in metrics]
        found.setdefault(name, []).append(sent)
    first = next((metrics for own in found.values() for metrics in own), None)
    if not first:
        return sweep_html(table, varied)
    figure, (by_time, by_bytes) = _axes(first[0])
    for number, (name, own) in enumerate(list(found.items())[:_MAX_LINES]):
        short = name if len(name) <= _MAX_LETTERS else f"{name[: _MAX_LETTERS - 1]}…"
        style = {**line_style(number), "label": short}
        scores = _means([_scores(metrics) for metrics in own])
        for axes, key in ((by_time, "virtual_time_s"), (by_bytes, "sent")):
            places = [[row[key] for row in metrics] for metrics in own]
            axes.plot(_means(places), scores, **style)
    by_time.set_xlabel("virtual time")
    by_bytes.set_xlabel("sent per worker")
    log_axis(by_time, "s")
    log_axis(by_bytes, "B")
    handles, labels = by_time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, handlelength=3.5)
    left_out = len(found) - _MAX_LINES
    note = f"<p>{left_out} more methods are not drawn.</p>" if left_out > 0 else ""
    image = _image(figure, "score of each method against time and bytes, means over seeds")
    return f"{sweep_html(table, varied)}{image}{note}"


def _axes(row: Row) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=_SIZE, layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    name = score_name(row)
    both[0].set_ylabel("test accuracy [%]" if name == "accuracy" else f"test {name}")
    for axes in both:
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    return figure, both


def _scores(metrics: Sequence[Row]) -> list[float]:
    """NaN is not drawn."""
    factor = 100 if score_name(metrics[0]) == "accuracy" else 1
    values = [score_value(row) for row in metrics]
    return [math.nan if value is None else factor * value for value in values]


def _means(columns: Sequence[Sequence[float]]) -> list[float]:
    """Row by row, over as many rows as all columns have."""
    return [mean(values) for values in zip(*columns)]


def _image(figure: Figure, description: str) -> str:
    """A figure as an image in the text, which works where scripts and files do not."""
    import matplotlib

    written = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "gradwire", "svg.fonttype": "none"}):
        figure.savefig(written, format="svg", metadata={"Date": None}, facecolor="white")
    content = base64.b64encode(written.getvalue()).decode()
    return (
        f"<img alt='{escape(description, quote=True)}' style='max-width:100%' "
        f"src='data:image/svg+xml;base64,{content}'>"
    )
