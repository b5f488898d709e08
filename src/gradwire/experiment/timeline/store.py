"""The spans of a run on disk: one file for each node, and one clock for all of them.

`spans-RANK.jsonl` holds one JSON value in a line: first what it is, then

    ["span", lane, name, start, end, ready, link]   link: null, or a list that names the message,
                                                    or in a real run the collective: its number
    ["step", step, time]                            the worker has finished this step

Nodes of one machine have the same clock. Clocks of different machines are aligned by their
messages to and from the coordinator: if the fastest one took a seconds there and b back, as the two
clocks show it, they differ by (a - b) / 2. This is exact up to half of the time that the fastest
message there and the fastest one back took together (Mills 1991, NTP).
"""

import json
import math
import platform
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire.core.layout import NodeLayout
from gradwire.experiment.run.config import Engine
from gradwire.runtime.process.spans import ProcessSpans
from gradwire.runtime.spans import LANES, RECEIVE, SEND, Span, SpanLog, StepEnd
from gradwire.runtime.storage.files import DamagedError, naming, write_atomically

_FORMAT, _VERSION = "gradwire spans", 1
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Link = tuple[Any, ...]


@dataclass
class NodeSpans:
    """The spans of one node, with names of its messages instead of numbers."""

    rank: int
    num_workers: int
    num_nodes: int
    coordinator: int
    engine: Engine
    host: str  # nodes with the same one have the same clock
    spans: list[tuple[Span, Link | None]] = field(default_factory=list)
    steps: list[StepEnd] = field(default_factory=list)


def host_name() -> str:
    """The machine, as far as its monotonic clock is concerned."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return platform.node()


def spans_path(folder: Path, rank: int) -> Path:
    return folder / f"spans-{rank}.jsonl"


def nodes_of(log: SpanLog) -> list[NodeSpans]:
    """The nodes of a simulated run."""
    nodes = [
        NodeSpans(rank, log.num_workers, log.num_nodes, 0, "simulator", "simulator")
        for rank in range(log.num_nodes)
    ]
    for span in log.spans:
        nodes[span.rank].spans.append((span, None if span.message < 0 else (span.message,)))
    for end in log.steps:
        nodes[end.rank].steps.append(end)
    return nodes


def spans_of(recorded: ProcessSpans, layout: NodeLayout) -> NodeSpans:
    """What a rank of a real run has recorded."""
    rank, log = recorded.rank, recorded.log
    node = NodeSpans(
        rank, log.num_workers, log.num_nodes, layout.coordinator, "process", host_name()
    )
    for number, span in enumerate(log.spans):
        link: Link | None = None
        if number in recorded.collectives:
            link = (recorded.collectives[number],)
        elif number in recorded.messages:
            peer, tag, index = recorded.messages[number]
            link = (rank, peer, tag, index) if span.lane == SEND else (peer, rank, tag, index)
        node.spans.append((span, link))
    node.steps = list(log.steps)
    return node


def write_spans(folder: Path, node: NodeSpans) -> None:
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "rank": node.rank,
        "workers": node.num_workers,
        "nodes": node.num_nodes,
        "coordinator": node.coordinator,
        "engine": node.engine,
        "host": node.host,
    }
    lines: list[Any] = [head]
    lines += [
        ["span", span.lane, span.name, span.start_s, span.end_s, span.ready_s, link]
        for span, link in node.spans
    ]
    lines += [["step", end.step, end.time_s] for end in node.steps]
    content = "".join(f"{json.dumps(line)}\n" for line in lines)
    write_atomically(spans_path(folder, node.rank), content.encode())


def read_log(folder: Path) -> SpanLog:
    """The spans of all nodes of the run in a folder, on one clock that begins at 0."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: name that of a run")
    paths = sorted(folder.glob("spans-*.jsonl"))
    if not paths:
        raise ValueError(
            f"{folder} holds no spans: record them with gradwire run --record-spans --out FOLDER"
        )
    nodes = sorted((_read(path) for path in paths), key=lambda node: node.rank)
    missing = set(range(nodes[0].num_nodes)) - {node.rank for node in nodes}
    if missing:
        names = ", ".join(map(str, sorted(missing)))
        raise ValueError(
            f"{folder} has no spans of rank {names}: these files are written at the end of a run. "
            "Copy them here if that rank wrote them on another machine."
        )
    return merge(nodes)


def merge(nodes: Sequence[NodeSpans]) -> SpanLog:
    """One log of all nodes: clocks aligned, messages numbered."""
    offsets = clock_offsets(nodes)
    log = SpanLog(nodes[0].num_workers, nodes[0].num_nodes)
    numbers: dict[Link, int] = {}
    sent: dict[int, Span] = {}
    is_real = nodes[0].engine == "process"
    for node in nodes:
        shift = offsets[node.host]
        for span, link in node.spans:
            number = -1 if link is None else numbers.setdefault(link, len(numbers))
            moved = replace(
                span,
                start_s=span.start_s - shift,
                end_s=span.end_s - shift,
                ready_s=span.ready_s - shift,
                message=number,
            )
            log.spans.append(moved)
            # All ranks send in a collective. It begins with the last of them.
            if moved.lane == SEND and (number not in sent or sent[number].start_s < moved.start_s):
                sent[number] = moved
        log.steps += [replace(end, time_s=end.time_s - shift) for end in node.steps]
    if is_real:
        collectives = {number for link, number in numbers.items() if _is_collective(link)}
        log.spans = [
            _begun_by_all(span, sent[span.message])
            if span.message in collectives
            else _travelled(span, sent.get(span.message))
            for span in log.spans
        ]
    return _from_zero(log)


def clock_offsets(nodes: Sequence[NodeSpans]) -> dict[str, float]:
    """By machine: how far its clock is ahead of that of the coordinator's machine."""
    reference = next(node.host for node in nodes if node.rank == node.coordinator)
    hosts = {node.host for node in nodes}
    if hosts == {reference}:
        return {reference: 0.0}
    sent = {
        link: (node.host, span.start_s)
        for node in nodes
        for span, link in node.spans
        if link is not None and span.lane == SEND and not _is_collective(link)
    }
    fastest: defaultdict[tuple[str, str], float] = defaultdict(lambda: math.inf)
    for node in nodes:
        for span, link in node.spans:
            if span.lane == RECEIVE and link in sent:
                host, start_s = sent[link]
                way = (host, node.host)
                fastest[way] = min(fastest[way], span.end_s - start_s)
    offsets = {reference: 0.0}
    for host in sorted(hosts - {reference}):
        there, back = fastest[reference, host], fastest[host, reference]
        if math.isinf(there) or math.isinf(back):
            raise ValueError(
                f"the clocks of two machines cannot be aligned: no message went from {reference} "
                f"to {host} and back in this recording"
            )
        offsets[host] = (there - back) / 2
    return offsets


def _travelled(span: Span, sent: Span | None) -> Span:
    """A message that was received, from when it was handed over."""
    if span.lane != RECEIVE or sent is None:
        return span
    start = min(sent.start_s, span.end_s)
    name = f"{sent.name.rpartition(' to ')[0]} from {sent.rank}"
    return replace(span, name=name, start_s=start, ready_s=start)


def _is_collective(link: Link) -> bool:
    """In a real run. A message has its sender, receiver, tag and number there."""
    return len(link) == 1


def _begun_by_all(span: Span, last: Span) -> Span:
    """One rank's part in a collective, from when the last rank began it."""
    start = min(last.start_s, span.end_s)
    return replace(span, start_s=start, ready_s=start if span.lane == RECEIVE else span.ready_s)


def _from_zero(log: SpanLog) -> SpanLog:
    first = min((span.start_s for span in log.spans), default=0.0)
    log.spans = [
        replace(
            span,
            start_s=span.start_s - first,
            end_s=span.end_s - first,
            ready_s=span.ready_s - first,
        )
        for span in log.spans
    ]
    log.steps = [replace(end, time_s=end.time_s - first) for end in log.steps]
    return log


def _read(path: Path) -> NodeSpans:
    with naming(path, "read"):
        content = path.read_bytes()
    lines = _values(path, content)
    try:
        head = next(lines)[1]
        if head["format"] != _FORMAT or head["version"] != _VERSION:
            raise ValueError
        names = ("rank", "workers", "nodes", "coordinator")
        rank, num_workers, num_nodes, coordinator = (head[name] for name in names)
        for value in (rank, num_workers, coordinator):
            if type(value) is not int or not 0 <= value <= num_nodes:
                raise ValueError
        engine, host = head["engine"], head["host"]
        if engine not in ("simulator", "process") or not isinstance(host, str):
            raise ValueError
    except (StopIteration, KeyError, TypeError, ValueError):
        raise DamagedError(f"{path} is no file of spans of this version: record again") from None
    node = NodeSpans(rank, num_workers, num_nodes, coordinator, engine, host)
    for number, line in lines:
        try:
            match line:
                case ["span", str(lane), str(name), start, end, ready, link] if lane in LANES:
                    times = [_seconds(value) for value in (start, end, ready)]
                    span = Span(node.rank, lane, name, times[0], times[1], ready_s=times[2])
                    node.spans.append((span, None if link is None else _link(link)))
                case ["step", int(step), time_s]:
                    node.steps.append(StepEnd(node.rank, step, _seconds(time_s)))
                case _:
                    raise ValueError
        except ValueError:
            raise DamagedError(
                f"{path}: line {number} is neither a span nor a step: record again"
            ) from None
    return node


def _values(path: Path, content: bytes) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            yield number, json.loads(line)
        except ValueError:
            raise DamagedError(f"{path}: line {number} is not JSON: record again") from None


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _link(value: Any) -> Link:
    if not isinstance(value, list) or not all(isinstance(part, int) for part in value):
        raise ValueError
    return tuple(value)
