"""The table of a comparison and its figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from gradwire.core.units import format_bytes
from gradwire.experiment.report.drawing import line_style, log_axis, save
from gradwire.experiment.report.score import (
    format_score,
    format_spread,
    has_spread,
    score_name,
    score_value,
)

if TYPE_CHECKING:  # the command line's help needs no torch
    from gradwire.experiment.run.record import Row
    from gradwire.experiment.studies.compare import Outcome


def format_seconds(seconds: float) -> str:
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:.3g} s"


def comparison_table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=0)
    table.add_column("method", overflow="fold", min_width=16)
    done = [row for row in rows if "failure" not in row]
    name = score_name(done[0]) if done else "accuracy"
    score = "test\nacc." if name == "accuracy" else f"test\n{name}"
    for column in (score, "bytes per\nworker\nand step", "ratio\nto fp32", "ratio\nto fp16"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in network_names(_bandwidths(rows)):
        table.add_column(f"time at\n{name}", justify="right", no_wrap=True)
    for row in rows:
        if "failure" in row:
            table.add_row(escape(row["method"]), row["failure"].partition(":")[0])
            continue
        table.add_row(
            escape(row["method"]),
            format_score(row),
            format_bytes(row["bytes_per_worker_step"]),
            format_ratio(row["ratio_fp32"]),
            format_ratio(row["ratio_fp16"]),
            *("-" if s is None else format_seconds(s) for s in row["virtual_times_s"].values()),
        )
    return table


def _bandwidths(rows: Sequence[Row]) -> list[str]:
    return next((list(row["virtual_times_s"]) for row in rows if "failure" not in row), [])


def network_names(bandwidths: Sequence[str]) -> list[str]:
    """The title of a column: the bandwidth, or a number if each node has its own."""
    return [
        f"net {number}" if "," in bandwidth else bandwidth.removesuffix("/s")
        for number, bandwidth in enumerate(bandwidths, start=1)
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes below the table: networks with a number, steps dropped, methods that failed."""
    done = [row for row in rows if "failure" not in row]
    bandwidths = _bandwidths(rows)
    return [
        *(
            f"{name}: {bandwidth}"
            for name, bandwidth in zip(network_names(bandwidths), bandwidths)
            if "," in bandwidth
        ),
        *(
            f"{row['method']} dropped {row['dropped_steps']} steps because of NaN or infinity"
            for row in done
            if row["dropped_steps"]
        ),
        *(
            f"{row['method']}: the {score_name(row)} is the mean over the workers' own models, "
            f"{format_spread(row)}"
            for row in done
            if has_spread(row)
        ),
        *(f"{row['method']} {remark}" for row in done for remark in row.get("remarks", ())),
        *(f"{row['method']} {row['failure']}" for row in rows if "failure" in row),
    ]


def counted_headers(architecture: str) -> str:
    """A note on the bytes counted for headers, if there are servers."""
    from gradwire.architecture import ARCHITECTURE
    from gradwire.core.wire import HEADER_NBYTES

    has_servers = ARCHITECTURE.parse(architecture).num_servers > 0
    return f"{HEADER_NBYTES} bytes counted for each header" if has_servers else ""


def format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def task_line(outcomes: Sequence[Outcome]) -> str:
    """What was trained, in one line, with the number of seeds that the figures come from."""
    run = next((outcome.run for outcome in outcomes if outcome.run), None)
    config = run.config if run else outcomes[0].config
    return (
        f"{config.workers} workers, {config.model or 'default model'} on {config.data}, "
        f"{config.steps} steps of batch {config.batch_size}, 1 seed"
    )


def comparison_figure(outcomes: Sequence[Outcome], path: Path) -> None:
    """Accuracy, or another metric, against virtual time and against bytes per worker.

    One line per method.

    The suffix of the path says the format: .png, .pdf or .svg.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(task_line(outcomes), fontsize=12)
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    bandwidth, score = "", "accuracy [%]"
    for number, outcome in enumerate(outcomes):
        run = outcome.run
        if run is None:
            continue
        bandwidth = run.config.bandwidth
        values = [score_value(row) for row in run.metrics]
        is_accuracy = score_name(run.summary) == "accuracy"
        score = score if is_accuracy else score_name(run.summary)
        scores = [v if v is None or not is_accuracy else 100 * v for v in values]
        for axes, places in (
            (by_time, [row["virtual_time_s"] for row in run.metrics]),
            (by_bytes, [row["bytes_sent"] / run.config.workers for row in run.metrics]),
        ):
            axes.plot(places, scores, label=outcome.label, **line_style(number))
    by_time.set_xlabel(f"virtual time at {network_names([bandwidth])[0]}")
    by_bytes.set_xlabel("sent per worker")
    by_time.set_ylabel(f"test {score}")
    for axes, unit in ((by_time, "s"), (by_bytes, "B")):
        if axes.lines:  # a logarithmic axis without data cannot be drawn
            log_axis(axes, unit)
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    handles, labels = by_time.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9, handlelength=3.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)
