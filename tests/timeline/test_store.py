"""Spans on disk, and the clocks of several machines."""

import json

import pytest

from gradwire.core.layout import NodeLayout
from gradwire.experiment.timeline.analysis import Window, critical_path, worker_figures
from gradwire.experiment.timeline.store import (
    NodeSpans,
    clock_offsets,
    merge,
    nodes_of,
    read_log,
    spans_of,
    spans_path,
    write_spans,
)
from gradwire.runtime.process.spans import ProcessSpans
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


def collective(hosts: tuple[str, str], ahead_s: float = 0.0) -> list[NodeSpans]:
    """Both compute from 16 on, rank 1 longer; then they form a mean, which rank 0 has last."""
    nodes = real(hosts, ahead_s)
    for rank, computed_s, ended_s in ((0, 17.0, 20.5), (1, 19.0, 20.0)):
        shift = rank * ahead_s
        start, end = computed_s + shift, ended_s + shift
        nodes[rank].spans += [
            (Span(rank, "compute", "gradient", 16.0 + shift, start, ready_s=16.0 + shift), None),
            (Span(rank, "send", "all-reduce fc1", start, end, ready_s=start), (1,)),
            (Span(rank, "receive", "all-reduce fc1", start, end, ready_s=start), (1,)),
        ]
    return nodes


def test_a_collective_is_on_the_network_when_all_have_begun_it():
    log = merge(collective(("a", "a")))
    spans = [span for span in log.spans if span.name == "all-reduce fc1"]
    assert sorted((span.rank, span.lane, span.start_s, span.end_s) for span in spans) == [
        (rank, lane, 9.0, end_s)
        for rank, end_s in ((0, 10.5), (1, 10.0))
        for lane in ("receive", "send")
    ]
    window = Window(6.0, 10.5)
    first, second = (worker_figures(log.spans, rank, window) for rank in (0, 1))
    assert (first.exposed_s, first.waiting_for_others_s) == (3.5, 2.0)
    assert (second.exposed_s, second.waiting_for_others_s) == (1.5, 0.5)
    assert [(p.kind, p.rank, p.start_s, p.end_s) for p in critical_path(log.spans, window)] == [
        ("compute", 1, 6.0, 9.0),
        ("network", 0, 9.0, 10.5),
    ]


def test_a_collective_says_nothing_of_clocks():
    assert clock_offsets(collective(("a", "b"), 1000.0)) == {"a": 0.0, "b": pytest.approx(1000.0)}


def test_a_rank_records_when_a_collective_began_and_ended(tmp_path):
    spans = ProcessSpans(0, SpanLog(1, 1))
    spans.start_collective(7, "fc1")
    spans.start_collective(8, "")
    spans.finish_collective(7)
    spans.finish_collective(9)  # one that began before the recording
    write_spans(tmp_path, spans_of(spans, NodeLayout.of(1)))
    log = read_log(tmp_path)
    assert [(span.lane, span.name) for span in log.spans] == [
        ("send", "all-reduce fc1"),
        ("receive", "all-reduce fc1"),
    ]
    assert log.spans[0].message == log.spans[1].message >= 0


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
