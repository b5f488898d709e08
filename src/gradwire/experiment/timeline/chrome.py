"""Timelines as Chrome traces, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The format is that of Google's "Trace Event Format": complete events (`"ph": "X"`) in microseconds,
a process for each node and a thread for each lane. Events of a thread must not overlap, so a lane
on which several messages travel at once has several threads.
"""

from collections.abc import Sequence
from typing import Any

from gradwire.runtime.spans import LANES, Span, SpanLog

_PER_LANE = 100  # threads
_US = 1e6


def chrome_trace(log: SpanLog, spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as an object to be written as JSON."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], str] = {}
    free: dict[tuple[int, int], float] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        thread = LANES.index(span.lane) * _PER_LANE
        while free.get((span.rank, thread), span.start_s) > span.start_s:
            thread += 1
        free[span.rank, thread] = span.end_s
        threads[span.rank, thread] = span.lane
        events.append(
            {
                "name": span.name,
                "cat": span.lane,
                "ph": "X",
                "ts": span.start_s * _US,
                "dur": (span.end_s - span.start_s) * _US,
                "pid": span.rank,
                "tid": thread,
            }
        )
    names = [
        *(_named("process_name", rank, 0, node_name(log, rank)) for rank in range(log.num_nodes)),
        *(_named("thread_name", *key, lane) for key, lane in sorted(threads.items())),
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def node_name(log: SpanLog, rank: int) -> str:
    if rank < log.num_workers:
        return f"worker {rank}"
    is_scheduler = rank == log.num_nodes - 1 > log.num_workers
    return "scheduler" if is_scheduler else f"server {rank - log.num_workers}"


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}
