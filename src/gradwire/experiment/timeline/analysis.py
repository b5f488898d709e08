"""Figures of a timeline: exposed communication, busy shares, the critical path.

All functions are pure: spans in, seconds out.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradwire.runtime.spans import CODING, COMPUTE, LANES, RECEIVE, SEND, Span, SpanLog

Interval = tuple[float, float]
NETWORK, LATENCY, IDLE = "network", "latency", "idle"
PATH_KINDS = (COMPUTE, "coding", NETWORK, LATENCY, IDLE)

_TOLERANCE = 1e-12  # relative and absolute: times that differ by rounding are the same


@dataclass(frozen=True)
class Window:
    """The part of a run that is shown."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class WorkerFigures:
    """How one worker spent a window. Shares are of its length."""

    rank: int
    exposed_s: float  # neither computing nor coding: it waits for messages
    waiting_for_others_s: float  # of that, with an idle network card: for slower workers
    busy: dict[str, float]  # share by lane


@dataclass(frozen=True)
class PathPiece:
    """A part of the critical path."""

    kind: str
    rank: int
    name: str
    start_s: float
    end_s: float


def window_of(log: SpanLog, skip: int, num_steps: int) -> Window:
    """The window of some steps: until the slowest worker has finished them.

    Steps count from the first one that was recorded. The window ends earlier if a worker had
    nothing more to do by then, as fast workers of methods that do not wait for one another.
    """
    ends: dict[int, dict[int, float]] = defaultdict(dict)
    for end in log.steps:
        ends[end.rank][end.step] = end.time_s
    if not ends:
        raise ValueError(
            "no worker has finished a step in this recording: record more steps, and until the end"
        )
    first = max(min(of_rank) for of_rank in ends.values()) + skip
    last = first + num_steps - 1
    num_recorded = min(max(of_rank) for of_rank in ends.values()) + 1 - (first - skip)
    if skip + num_steps > num_recorded:
        raise ValueError(
            f"--skip {skip} and --steps-shown {num_steps} need {skip + num_steps} steps, but this "
            f"recording has {max(0, num_recorded)}: lower them, or record more"
        )
    begin = min((span.start_s for span in log.spans), default=0.0)
    # A worker that was lost and came back may have left out steps.
    starts = [
        max((s for step, s in of_rank.items() if step < first), default=begin)
        for of_rank in ends.values()
    ]
    done = [
        min(s for step, s in of_rank.items() if step >= last)  # the next one if it left this out
        for of_rank in ends.values()
    ]
    all_are_busy_until = min(max(of_rank.values()) for of_rank in ends.values())
    start = min(starts)
    return Window(start, min(max(done), max(all_are_busy_until, start)))


def clip(spans: Iterable[Span], window: Window) -> list[Span]:
    """The spans that lie in a window, at least partly."""
    return [span for span in spans if span.end_s > window.start_s and span.start_s < window.end_s]


def union(intervals: Iterable[Interval], window: Window) -> list[Interval]:
    """Disjoint intervals in order that cover the same times of a window."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        start, end = max(start, window.start_s), min(end, window.end_s)
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def gaps(intervals: Sequence[Interval], window: Window) -> list[Interval]:
    """The times of a window that disjoint intervals in order do not cover."""
    starts = [window.start_s, *(end for _, end in intervals)]
    ends = [*(start for start, _ in intervals), window.end_s]
    return [(start, end) for start, end in zip(starts, ends) if end > start]


def total_s(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def waits(spans: Iterable[Span], rank: int, window: Window) -> list[Interval]:
    """The times in which a worker neither computes nor codes."""
    own = [
        (span.start_s, span.end_s)
        for span in spans
        if span.rank == rank and span.lane not in (SEND, RECEIVE)
    ]
    return gaps(union(own, window), window)


def worker_figures(spans: Sequence[Span], rank: int, window: Window) -> WorkerFigures:
    lanes: dict[str, list[Interval]] = {lane: [] for lane in LANES}
    for span in spans:
        if span.rank == rank:
            lanes[span.lane].append((span.start_s, span.end_s))
    busy = {lane: total_s(union(own, window)) for lane, own in lanes.items()}
    working = [pair for lane in (COMPUTE, *CODING) for pair in lanes[lane]]
    anything = [pair for own in lanes.values() for pair in own]
    length = window.seconds or 1.0
    return WorkerFigures(
        rank,
        total_s(gaps(union(working, window), window)),
        total_s(gaps(union(anything, window), window)),
        {lane: seconds / length for lane, seconds in busy.items()},
    )


def critical_path(spans: Sequence[Span], window: Window) -> list[PathPiece]:
    """What the last span of a window waited for, back to the beginning; pieces in order of time.

    A node's work begins when the latest of its gradients, calls and received messages before it has
    ended. A message that had to queue for a network card waited for the one before it there;
    otherwise for its sender. A collective waited for the rank that began it last. Times in which
    nothing is recorded on the path are `idle`: timers, and in real runs the engine itself.
    """
    return _Walk(spans, window).pieces()


def path_seconds(pieces: Iterable[PathPiece]) -> dict[str, float]:
    """The seconds of a critical path by kind."""
    seconds = dict.fromkeys(PATH_KINDS, 0.0)
    for piece in pieces:
        seconds[piece.kind] += piece.end_s - piece.start_s
    return seconds


class _Walk:
    """Goes back in time from the end of a window."""

    def __init__(self, spans: Sequence[Span], window: Window) -> None:
        self._window = window
        # Of a collective, which all send: that of the rank that began last.
        sends = sorted((span for span in spans if span.lane == SEND), key=lambda span: span.ready_s)
        self._sends = {span.message: span for span in sends}
        self._ended: dict[tuple[int, bool], list[Span]] = defaultdict(list)
        for span in sorted(spans, key=lambda span: span.end_s):
            self._ended[span.rank, span.lane == SEND].append(span)
        self._ends = {key: [span.end_s for span in own] for key, own in self._ended.items()}
        self._visited: set[Span] = set()
        self._pieces: list[PathPiece] = []

    def pieces(self) -> list[PathPiece]:
        window = self._window
        received = [key for key in self._ended if not key[1]]
        last = [found for rank, _ in received if (found := self._latest(rank, window.end_s))]
        span = max(last, key=lambda found: found.end_s, default=None)
        time_s = window.end_s
        while span is not None and time_s > window.start_s:
            self._visited.add(span)
            if _is_after(time_s, span.end_s):
                self._add(IDLE, span.rank, "", span.end_s, time_s)
                time_s = span.end_s
            if span.lane == SEND:
                self._add(NETWORK, span.rank, span.name, span.start_s, time_s)
                time_s, span = self._before_send(span)
            elif span.lane == RECEIVE:
                time_s, span = self._before_receive(span, time_s)
            else:
                kind = COMPUTE if span.lane == COMPUTE else "coding"
                self._add(kind, span.rank, span.name, span.start_s, time_s)
                time_s, span = span.start_s, self._latest(span.rank, span.start_s, span)
        if _is_after(time_s, window.start_s) and self._pieces:
            self._add(IDLE, self._pieces[-1].rank, "", window.start_s, time_s)
        return self._pieces[::-1]

    def _before_receive(self, span: Span, time_s: float) -> tuple[float, Span | None]:
        self._add(NETWORK, span.rank, span.name, span.start_s, time_s)
        if _is_after(span.start_s, span.ready_s):  # the card was busy with another message
            before = self._latest(span.rank, span.start_s, span, lanes=(RECEIVE,))
            if before is not None and not _is_after(span.start_s, before.end_s):
                return span.start_s, before
            self._add(NETWORK, span.rank, span.name, span.ready_s, span.start_s)
        ready = min(span.ready_s, span.start_s)
        sent = self._sends.get(span.message)
        if sent is None:  # it was sent before the recording began
            return ready, self._latest(span.rank, ready, span)
        self._add(LATENCY, sent.rank, span.name, sent.start_s, ready)
        return self._before_send(sent)

    def _before_send(self, span: Span) -> tuple[float, Span | None]:
        """When a message began to leave, and what it had waited for."""
        self._visited.add(span)
        if _is_after(span.start_s, span.ready_s):
            before = self._latest(span.rank, span.start_s, span, lanes=(SEND,))
            if before is not None and not _is_after(span.start_s, before.end_s):
                return span.start_s, before
            self._add(NETWORK, span.rank, span.name, span.ready_s, span.start_s)
        return span.ready_s, self._latest(span.rank, span.ready_s)

    def _latest(
        self,
        rank: int,
        time_s: float,
        after: Span | None = None,
        lanes: Sequence[str] = (COMPUTE, *CODING, RECEIVE),
    ) -> Span | None:
        """The span of a node that ended last by this time; of several the one most like `after`."""
        key = (rank, lanes == (SEND,))
        own = self._ended.get(key, [])
        found: Span | None = None
        for position in range(bisect_right(self._ends.get(key, []), time_s + _slack(time_s)))[::-1]:
            span = own[position]
            if found is not None and _is_after(found.end_s, span.end_s):
                break
            if span.lane in lanes and span not in self._visited:
                better = found is None or _rank_of(span, after) < _rank_of(found, after)
                found = span if better else found
        return found

    def _add(self, kind: str, rank: int, name: str, start_s: float, end_s: float) -> None:
        start_s, end_s = max(start_s, self._window.start_s), min(end_s, self._window.end_s)
        if end_s > start_s:
            self._pieces.append(PathPiece(kind, rank, name, start_s, end_s))


def _rank_of(span: Span, after: Span | None) -> int:
    """Of spans that ended together, the one of the same lane comes first, then gradients."""
    if after is not None and span.lane == after.lane:
        return -1
    return LANES.index(span.lane)


def _slack(time_s: float) -> float:
    return _TOLERANCE * max(1.0, abs(time_s))


def _is_after(later_s: float, earlier_s: float) -> bool:
    """Whether a time is after another one by more than rounding."""
    return later_s - earlier_s > _slack(later_s)
