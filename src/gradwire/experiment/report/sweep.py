"""The table of a sweep, on a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape as escape_html
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from gradwire.core.units import format_bytes
from gradwire.experiment.report.comparison import format_ratio, format_seconds, network_names

if TYPE_CHECKING:
    from gradwire.experiment.run.record import Row


def sweep_table(rows: Sequence[Row], varied: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    head, *lines = _cells(rows, varied)
    num_texts = 1 + len(varied)  # columns of text
    for number, title in enumerate(head):
        if number < num_texts:
            table.add_column(title, overflow="fold", min_width=8)
        else:
            table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def sweep_html(rows: Sequence[Row], varied: Sequence[str]) -> str:
    head, *lines = _cells(rows, varied)
    titles = "".join(f"<th>{escape_html(title)}</th>" for title in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape_html(cell)}</td>" for cell in line) + "</tr>"
        for line in lines
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def sweep_notes(rows: Sequence[Row]) -> list[str]:
    """Why runs have no result, each reason once for each method."""
    return [
        f"{row['method']}: {row['failed']} of {row['failed'] + row['seeds']} seeds {reason}"
        for row in rows
        for reason in row.get("failures", ())
    ]


def _cells(rows: Sequence[Row], varied: Sequence[str]) -> list[list[str]]:
    """The titles and the lines of the table."""
    done = [row for row in rows if row["seeds"]]
    name = done[0]["score"] if done else "accuracy"
    bandwidths = list(dict.fromkeys(each for row in done for each in row["virtual_times_s"]))
    times = [f"time {each}" for each in network_names(bandwidths)]
    title = "test acc. %" if name == "accuracy" else f"test {name}"
    figures = [title, "seeds", "bytes /worker /step", "to fp32", "to fp16", *times]
    lines = [["method", *(each.replace("_", " ") for each in varied), *figures]]
    for row in rows:
        line = [str(row["method"]), *(str(row[each]) for each in varied)]
        if not row["seeds"]:
            kind = row["failures"][0].partition(":")[0]
            lines.append([*line, kind, "0", *["-"] * (len(figures) - 2)])
            continue
        seconds = [row["virtual_times_s"].get(each) for each in bandwidths]
        lines.append(
            [
                *line,
                _score(row),
                str(row["seeds"]),
                format_bytes(row["bytes_per_worker_step"]),
                format_ratio(row["ratio_fp32"]),
                format_ratio(row["ratio_fp16"]),
                *("-" if each is None else format_seconds(each) for each in seconds),
            ]
        )
    return lines


def _score(row: Row) -> str:
    """The mean over seeds, and the standard deviation if there are several."""
    value, spread = row["score_mean"], row["score_std"]
    if value is None:
        return "nan"
    if row["score"] != "accuracy":
        return f"{value:.4g}" + ("" if spread is None else f" ± {spread:.2g}")
    return f"{100 * value:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")
