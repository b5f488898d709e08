"""Timelines of single steps, from the spans that a run has recorded."""

from pathlib import Path
from typing import Any

from gradwire.experiment.report.page.courses import short
from gradwire.experiment.run.record import Row
from gradwire.experiment.timeline.analysis import Window, clip, waits, window_of
from gradwire.experiment.timeline.chart import WAIT, kind_of
from gradwire.experiment.timeline.chrome import node_name
from gradwire.experiment.timeline.report import figures_of
from gradwire.experiment.timeline.store import read_log
from gradwire.runtime.spans import CODING, COMPUTE, RECEIVE, SEND, SpanLog

LANES = (COMPUTE, "coding", SEND, RECEIVE)
_LANE_OF = {COMPUTE: 0, **dict.fromkeys(CODING, 1), SEND: 2, RECEIVE: 3}
_MAX_STEPS, _MAX_NODES = 8, 8
_MAX_SPANS = 6000  # of all steps of a run in the page


def timeline_of(folder: Path) -> Row:
    """Some steps of a run; or `reason`, why there are none."""
    try:
        log = read_log(folder)
        steps = _steps(log)
    except (ValueError, OSError) as error:
        return {"reason": str(error)}
    nodes = min(log.num_nodes, _MAX_NODES)
    return {
        "steps": steps,
        "nodes": [node_name(log, rank) for rank in range(nodes)],
        "num_nodes": log.num_nodes,
    }


def _steps(log: SpanLog) -> list[Row]:
    """The first steps after the very first one, which is not like the others."""
    first = min(end.step for end in log.steps) if log.steps else 0
    steps: list[Row] = []
    num_spans = 0
    for skip in range(1, _MAX_STEPS + 1):
        try:
            window = window_of(log, skip, 1)
        except ValueError:
            if steps or skip > 1:
                break
            window = window_of(log, 0, 1)  # it has but one
            skip = 0
        spans = _spans(log, window)
        num_spans += len(spans)
        if steps and num_spans > _MAX_SPANS:
            break
        figures = figures_of(log, window)
        figures["workers"] = figures["workers"][:_MAX_NODES]
        steps.append({"step": first + skip, "spans": spans[:_MAX_SPANS], **figures})
        if skip == 0:
            break
    return steps


def _spans(log: SpanLog, window: Window) -> list[list[Any]]:
    """Node, lane, kind, name, start and end, in seconds since the beginning of the step."""
    found: list[list[Any]] = []
    spans = clip(log.spans, window)
    for rank in range(min(log.num_workers, _MAX_NODES)):
        for start, end in waits(spans, rank, window):
            found.append([rank, 0, WAIT, WAIT, *_times(start, end, window)])
    for span in spans:
        if span.rank < _MAX_NODES:
            times = _times(span.start_s, span.end_s, window)
            found.append([span.rank, _LANE_OF[span.lane], kind_of(span), span.name, *times])
    return found


def _times(start_s: float, end_s: float, window: Window) -> tuple[float, float]:
    start, end = max(start_s, window.start_s), min(end_s, window.end_s)
    return short(start - window.start_s), short(end - window.start_s)
