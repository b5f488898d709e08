"""The picture of timelines: lanes over time, one panel for each run.

One run has four lanes for each node: gradients, coding, and the two directions of its network card.
Several runs next to each other have one line for each worker, with its messages below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.experiment.report.drawing import save
from gradwire.experiment.timeline.analysis import Window, clip, waits
from gradwire.experiment.timeline.chrome import node_name
from gradwire.runtime.spans import CODING, COMPUTE, RECEIVE, SEND, Span, SpanLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORWARD, BACKWARD, WAIT = "forward", "backward", "wait"
COLOURS = {  # Okabe and Ito, and greys
    FORWARD: "#56b4e9",
    BACKWARD: "#0072b2",
    COMPUTE: "#00507d",
    "encode": "#d55e00",
    "decode": "#e69f00",
    "update": "#009e73",
    "other": "#999999",
    SEND: "#cc79a7",
    RECEIVE: "#8c5a9e",
    WAIT: "#e3e3e3",
}
_LABELS = {
    COMPUTE: "gradient (both passes)",
    "other": "other calls",
    WAIT: "wait (neither computing nor coding)",
}
_ROW = 0.2  # inches
_GAP = 0.5  # rows between nodes
_MAX_LABEL_SHARE = 0.012  # of the axis, for each letter of a label inside a span
_UNITS = ((1e-3, "us", 1e6), (1.0, "ms", 1e3), (float("inf"), "s", 1.0))


@dataclass(frozen=True)
class Panel:
    """A run, and the part of it that is drawn."""

    title: str
    log: SpanLog
    window: Window


def draw(panels: Sequence[Panel], path: Path, title: str = "") -> None:
    """Draws one panel for each run, on the same scale of time."""
    from matplotlib.figure import Figure  # takes a second to import
    from matplotlib.patches import Patch

    is_compact = len(panels) > 1
    length = max(panel.window.seconds for panel in panels)
    unit, factor = next((unit, factor) for most, unit, factor in _UNITS if length < most)
    heights = [_height(panel, is_compact) for panel in panels]
    figure = Figure(figsize=(9, sum(heights) + 0.45 * len(panels) + 0.9), layout="constrained")
    all_axes = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    if title:
        figure.suptitle(title, fontsize=10)
    used: set[str] = set()
    for axes, panel in zip(all_axes, panels):
        draw_panel = _draw_workers if is_compact else _draw_lanes
        used |= draw_panel(axes, panel, factor)
        _draw_steps(axes, panel, factor)
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_xlim(0.0, length * factor)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0, labelsize=8)
        axes.tick_params(axis="x", labelsize=8)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    all_axes[-1].set_xlabel(f"time since the first step shown [{unit}]", fontsize=9)
    handles = [
        Patch(facecolor=colour, edgecolor="#bbbbbb", linewidth=0.5, label=_LABELS.get(kind, kind))
        for kind, colour in COLOURS.items()
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    save(figure, path)


def kind_of(span: Span) -> str:
    """What decides on the colour of a span."""
    if span.lane == COMPUTE:
        first = span.name.partition(" ")[0]  # "forward," is both passes
        return first if first in (FORWARD, BACKWARD) else COMPUTE
    return span.lane


def _nodes(panel: Panel) -> list[int]:
    """Workers, and other nodes that do something."""
    active = {span.rank for span in clip(panel.log.spans, panel.window)}
    num_workers = panel.log.num_workers
    return [rank for rank in range(panel.log.num_nodes) if rank < num_workers or rank in active]


def _height(panel: Panel, is_compact: bool) -> float:
    """In inches."""
    if is_compact:
        return 1.5 * _ROW * panel.log.num_workers + 0.2
    return _ROW * (4 + _GAP) * len(_nodes(panel))


def _draw_lanes(axes: Axes, panel: Panel, factor: float) -> set[str]:
    """Four lanes for each node. Returns the kinds of spans that were drawn."""
    rows = {COMPUTE: 0, **dict.fromkeys(CODING, 1), SEND: 2, RECEIVE: 3}
    names = ("compute", "coding", "send", "receive")
    nodes, used = _nodes(panel), set[str]()
    top = {rank: number * (len(names) + _GAP) for number, rank in enumerate(nodes)}
    labels = [f"{node_name(panel.log, rank)}  {names[0]}" for rank in nodes]
    axes.set_yticks(
        [top[rank] + row for rank in nodes for row in range(len(names))],
        [text for first in labels for text in (first, *names[1:])],
    )
    for rank in nodes:
        if rank < panel.log.num_workers:
            pauses = waits(panel.log.spans, rank, panel.window)
            for lane in (0, 1):
                _bars(axes, panel, factor, pauses, top[rank] + lane, 0.9, WAIT)
            used |= {WAIT} if pauses else set()
    for span in clip(panel.log.spans, panel.window):
        kind, row = kind_of(span), top[span.rank] + rows[span.lane]
        _bars(axes, panel, factor, [(span.start_s, span.end_s)], row, 0.9, kind)
        used.add(kind)
        _write_inside(axes, panel, factor, span, row)
    return used


def _draw_workers(axes: Axes, panel: Panel, factor: float) -> set[str]:
    """One line for each worker, with its messages below. Returns the kinds that were drawn."""
    workers, used = range(panel.log.num_workers), set[str]()
    axes.set_yticks([1.5 * rank for rank in workers], [f"worker {rank}" for rank in workers])
    for rank in workers:
        pauses = waits(panel.log.spans, rank, panel.window)
        _bars(axes, panel, factor, pauses, 1.5 * rank, 0.7, WAIT)
        used |= {WAIT} if pauses else set()
    for span in clip(panel.log.spans, panel.window):
        if span.rank not in workers:
            continue
        kind = kind_of(span)
        offset, height = {SEND: (0.5, 0.2), RECEIVE: (0.75, 0.2)}.get(kind, (0.0, 0.7))
        middle = 1.5 * span.rank + offset
        _bars(axes, panel, factor, [(span.start_s, span.end_s)], middle, height, kind)
        used.add(kind)
    return used


def _bars(
    axes: Axes,
    panel: Panel,
    factor: float,
    intervals: Sequence[tuple[float, float]],
    row: float,
    height: float,
    kind: str,
) -> None:
    start_s = panel.window.start_s
    clipped = [(max(start, start_s), min(end, panel.window.end_s)) for start, end in intervals]
    bars = [((start - start_s) * factor, (end - start) * factor) for start, end in clipped]
    edge = "none" if kind == WAIT else "white"
    axes.broken_barh(
        bars, (row - height / 2, height), facecolors=COLOURS[kind], edgecolors=edge, linewidth=0.3
    )


def _write_inside(axes: Axes, panel: Panel, factor: float, span: Span, row: float) -> None:
    """The name of a span, if it has room for it."""
    window = panel.window
    start, end = max(span.start_s, window.start_s), min(span.end_s, window.end_s)
    name = span.name.removeprefix("forward, ").removeprefix("forward ").removeprefix("backward ")
    if (end - start) / (window.seconds or 1.0) < _MAX_LABEL_SHARE * len(name):
        return
    light = kind_of(span) in (FORWARD, "decode", "other", SEND)
    axes.text(
        ((start + end) / 2 - window.start_s) * factor,
        row,
        name,
        ha="center",
        va="center_baseline",
        fontsize=6.5,
        color="black" if light else "white",
        clip_on=True,
    )


def _draw_steps(axes: Axes, panel: Panel, factor: float) -> None:
    """A mark where each worker ends a step, and a line where all do so together."""
    window = panel.window
    by_step: dict[int, list[float]] = {}
    for end in panel.log.steps:
        if window.start_s <= end.time_s <= window.end_s:
            by_step.setdefault(end.step, []).append(end.time_s)
    for times in by_step.values():
        if len(times) == panel.log.num_workers and max(times) - min(times) < 0.02 * window.seconds:
            axes.axvline(
                (max(times) - window.start_s) * factor, color="black", linewidth=0.8, linestyle=":"
            )
