"""The figures of a timeline, as one object to be printed or written as JSON."""

from typing import Any

from gradwire.experiment.timeline.analysis import (
    Window,
    critical_path,
    path_seconds,
    worker_figures,
)
from gradwire.runtime.spans import SpanLog


def figures_of(log: SpanLog, window: Window) -> dict[str, Any]:
    """Of each worker, and the seconds of the critical path by kind."""
    workers = []
    for rank in range(log.num_workers):
        found = worker_figures(log.spans, rank, window)
        workers.append(
            {
                "rank": rank,
                "exposed_s": found.exposed_s,
                "exposed_share": found.exposed_s / (window.seconds or 1.0),
                "waiting_for_others_s": found.waiting_for_others_s,
                **{f"busy_{lane}": share for lane, share in found.busy.items()},
            }
        )
    path = critical_path(log.spans, window)
    return {
        "window_s": window.seconds,
        "workers": workers,
        "critical_path_s": path_seconds(path),
    }
