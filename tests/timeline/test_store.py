"""Spans on disk, and the clocks of several machines."""

import json

import pytest

from gradwire.experiment.timeline.store import (
    NodeSpans,
    clock_offsets,
    merge,
    nodes_of,
    read_log,
    spans_path,
    write_spans,
)
from gradwire.runtime.spans import Span, SpanLog, StepEnd

SIMULATED = SpanLog(
    2,
    2,
    [
        Span(0, "compute", "gradient", 0.0, 1.0),
        Span(0, "send", "x to 1", 1.0, 2.0, 7, 1.0),
        Span(1, "receive", "x from 0", 1.5, 2.5, 7, 1.5),
    ],
    [StepEnd(0, 0, 1.0), StepEnd(1, 0, 2.5)],
)


def test_a_simulated_run_is_read_as_it_was_written(tmp_path):
    for node in nodes_of(SIMULATED):
        write_spans(tmp_path, node)
    log = read_log(tmp_path)
    assert (log.num_workers, log.num_nodes, log.steps) == (2, 2, SIMULATED.steps)
    times = [(span.lane, span.name, span.start_s, span.end_s, span.ready_s) for span in log.spans]
    assert times == [
        (span.lane, span.name, span.start_s, span.end_s, span.ready_s) for span in SIMULATED.spans
    ]
    assert log.spans[1].message == log.spans[2].message >= 0 > log.spans[0].message


def real(hosts: tuple[str, str], ahead_s: float) -> list[NodeSpans]:
    """Rank 0 sends at 10, rank 1 receives at 11 and answers at 13, rank 0 receives at 14; the
    second clock is ahead."""
    there, back = (0, 1, 5, 0), (1, 0, 5, 0)
    first = NodeSpans(0, 2, 2, 0, "process", hosts[0])
    second = NodeSpans(1, 2, 2, 0, "process", hosts[1])
    first.spans = [
        (Span(0, "send", "fc1 to 1", 10.0, 10.1, ready_s=10.0), there),
        (Span(0, "receive", "message from 1", 14.0, 14.0, ready_s=14.0), back),
    ]
    second.spans = [
        (
            Span(1, "receive", "message from 0", 11 + ahead_s, 11 + ahead_s, ready_s=11 + ahead_s),
            there,
        ),
        (Span(1, "send", "fc1 to 0", 13 + ahead_s, 13.1 + ahead_s, ready_s=13 + ahead_s), back),
    ]
    second.steps = [StepEnd(1, 0, 15 + ahead_s)]
    return [first, second]


def test_clocks_of_two_machines_are_aligned_by_the_fastest_messages():
    assert clock_offsets(real(("a", "b"), 1000.0)) == {"a": 0.0, "b": pytest.approx(1000.0)}
    assert clock_offsets(real(("a", "a"), 0.0)) == {"a": 0.0}
    log = merge(real(("a", "b"), 1000.0))
    assert log.steps == [StepEnd(1, 0, pytest.approx(5.0))]


def test_a_real_message_lasts_from_handing_over_to_arrival():
    log = merge(real(("a", "a"), 0.0))
    received = [span for span in log.spans if span.lane == "receive"]
    assert [(span.name, span.rank, span.start_s, span.end_s) for span in received] == [
        ("fc1 from 1", 0, 3.0, 4.0),
        ("fc1 from 0", 1, 0.0, 1.0),
    ]


def test_clocks_without_messages_there_and_back_are_refused():
    nodes = real(("a", "b"), 0.0)
    nodes[1].spans.pop()
    with pytest.raises(ValueError, match="clocks of two machines cannot be aligned"):
        clock_offsets(nodes)


def test_folders_without_spans(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        read_log(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no spans: record them with gradwire run --record"):
        read_log(tmp_path)
    write_spans(tmp_path, nodes_of(SIMULATED)[0])
    with pytest.raises(ValueError, match="has no spans of rank 1"):
        read_log(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        '["span"]',
        '["span", "nowhere", "x", 0, 1, 0, null]',
        '["span", "compute", "x", NaN, 1, 0, null]',
        '["span", "compute", "x", true, 1, 0, null]',
        '["span", "send", "x", 0, 1, 0, [[]]]',
        '["step", "x", 1]',
    ],
)
def test_damaged_lines_are_named(tmp_path, line):
    for node in nodes_of(SIMULATED):
        write_spans(tmp_path, node)
    with spans_path(tmp_path, 0).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"spans-0\.jsonl: line 5 is n"):
        read_log(tmp_path)


@pytest.mark.parametrize("change", [{"version": 9}, {"rank": -1}, {"rank": 7}, {"nodes": "x"}])
def test_files_of_something_else_are_refused(tmp_path, change):
    for node in nodes_of(SIMULATED):
        write_spans(tmp_path, node)
    path = spans_path(tmp_path, 1)
    head, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(head), **change}), *rest]))
    with pytest.raises(ValueError, match="is no file of spans of this version"):
        read_log(tmp_path)
