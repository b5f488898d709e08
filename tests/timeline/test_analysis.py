"""Exposed communication, busy shares and critical paths, computed by hand."""

import pytest

from gradwire.experiment.timeline.analysis import (
    Window,
    critical_path,
    path_seconds,
    union,
    waits,
    window_of,
    worker_figures,
)
from gradwire.runtime.spans import Span, SpanLog, StepEnd

ALL = Window(0.0, 10.0)


def exchange() -> list[Span]:
    """Worker 0 computes for 4 s, encodes until 5 and sends for 2 s (latency 1); worker 1 computes
    for 3 s and waits; it decodes from 8 to 9 and updates until 10."""
    return [
        Span(0, "compute", "gradient", 0.0, 4.0),
        Span(0, "encode", "encode", 4.0, 5.0),
        Span(0, "send", "x to 1", 5.0, 7.0, message=0, ready_s=5.0),
        Span(1, "compute", "gradient", 0.0, 3.0),
        Span(1, "receive", "x from 0", 6.0, 8.0, message=0, ready_s=6.0),
        Span(1, "decode", "decode", 8.0, 9.0),
        Span(1, "update", "update", 9.0, 10.0),
    ]


def test_union_of_intervals():
    assert union([(1.0, 3.0), (2.0, 4.0), (6.0, 12.0), (-1.0, 0.5)], ALL) == [
        (0.0, 0.5),
        (1.0, 4.0),
        (6.0, 10.0),
    ]


def test_waits_are_the_times_without_computing_and_coding():
    assert waits(exchange(), 1, ALL) == [(3.0, 8.0)]
    assert waits(exchange(), 0, ALL) == [(5.0, 10.0)]
    assert waits(exchange(), 0, Window(1.0, 4.5)) == []


def test_exposed_communication_and_busy_shares():
    figures = worker_figures(exchange(), 1, ALL)
    assert figures.exposed_s == pytest.approx(5.0)
    assert figures.waiting_for_others_s == pytest.approx(3.0)  # 3 to 6: its card is idle
    assert figures.busy == pytest.approx(
        {
            "compute": 0.3,
            "encode": 0.0,
            "decode": 0.1,
            "update": 0.1,
            "other": 0.0,
            "send": 0.0,
            "receive": 0.2,
        }
    )


def test_communication_under_computation_is_not_exposed():
    spans = [
        Span(0, "compute", "gradient", 0.0, 8.0),
        Span(0, "receive", "x from 1", 2.0, 6.0, message=0, ready_s=2.0),
        Span(0, "encode", "encode", 6.0, 9.0),
    ]
    assert worker_figures(spans, 0, ALL).exposed_s == pytest.approx(1.0)


def test_the_critical_path_goes_through_the_message():
    path = critical_path(exchange(), ALL)
    assert [(piece.kind, piece.rank, piece.start_s, piece.end_s) for piece in path] == [
        ("compute", 0, 0.0, 4.0),
        ("coding", 0, 4.0, 5.0),
        ("latency", 0, 5.0, 6.0),
        ("network", 1, 6.0, 8.0),
        ("coding", 1, 8.0, 9.0),
        ("coding", 1, 9.0, 10.0),
    ]
    assert path_seconds(path) == pytest.approx(
        {"compute": 4.0, "coding": 3.0, "network": 2.0, "latency": 1.0, "idle": 0.0}
    )


def test_the_critical_path_is_cut_at_the_window():
    assert path_seconds(critical_path(exchange(), Window(4.5, 8.5))) == pytest.approx(
        {"compute": 0.0, "coding": 0.5, "network": 2.0, "latency": 1.0, "idle": 0.5}
    )


def test_the_critical_path_does_not_follow_a_message_that_came_early():
    spans = [
        Span(0, "send", "x to 1", 0.0, 1.0, message=0, ready_s=0.0),
        Span(1, "receive", "x from 0", 1.0, 2.0, message=0, ready_s=1.0),
        Span(1, "compute", "gradient", 0.0, 9.0),
        Span(1, "decode", "decode", 9.0, 10.0),
    ]
    assert [piece.kind for piece in critical_path(spans, ALL)] == ["compute", "coding"]


def test_a_message_in_a_queue_waited_for_the_one_before_it():
    """Worker 0 hands over a at 1 and b at 2; b leaves when a has left, at 4."""
    spans = [
        Span(0, "compute", "gradient", 0.0, 1.0),
        Span(0, "encode", "encode", 1.0, 2.0),
        Span(0, "send", "a to 1", 1.0, 4.0, message=0, ready_s=1.0),
        Span(1, "receive", "a from 0", 1.5, 4.5, message=0, ready_s=1.5),
        Span(0, "send", "b to 1", 4.0, 8.0, message=1, ready_s=2.0),
        Span(1, "receive", "b from 0", 4.5, 8.5, message=1, ready_s=4.5),
        Span(1, "decode", "decode", 8.5, 10.0),
    ]
    assert path_seconds(critical_path(spans, ALL)) == pytest.approx(
        {"compute": 1.0, "coding": 1.5, "network": 7.0, "latency": 0.5, "idle": 0.0}
    )


def test_incast_waits_for_the_receivers_card():
    """Messages of 0 and 1 reach 2 at 1; that of 1, ready at 1, is received from 3 to 5."""
    spans = [
        Span(0, "send", "a to 2", 0.5, 2.5, message=0, ready_s=0.5),
        Span(1, "compute", "gradient", 0.0, 0.5),
        Span(0, "compute", "gradient", 0.0, 0.5),
        Span(1, "send", "b to 2", 0.5, 2.5, message=1, ready_s=0.5),
        Span(2, "receive", "a from 0", 1.0, 3.0, message=0, ready_s=1.0),
        Span(2, "receive", "b from 1", 3.0, 5.0, message=1, ready_s=1.0),
        Span(2, "decode", "decode", 5.0, 6.0),
    ]
    path = critical_path(spans, Window(0.0, 6.0))
    assert [(piece.kind, piece.rank) for piece in path] == [
        ("compute", 0),
        ("latency", 0),
        ("network", 2),
        ("network", 2),
        ("coding", 2),
    ]


def test_a_pause_on_the_path_is_idle():
    spans = [Span(0, "compute", "gradient", 0.0, 4.0), Span(0, "update", "update", 6.0, 10.0)]
    assert path_seconds(critical_path(spans, ALL))["idle"] == pytest.approx(2.0)


def log_of(ends: dict[int, list[float]]) -> SpanLog:
    steps = [StepEnd(rank, k, s) for rank, own in ends.items() for k, s in enumerate(own)]
    return SpanLog(len(ends), len(ends), [Span(0, "compute", "gradient", 0.5, 1.0)], steps)


def test_the_window_lasts_until_the_slowest_worker_is_done():
    log = log_of({0: [1.0, 2.0, 3.0, 4.0], 1: [1.5, 2.5, 3.5, 4.5]})
    assert window_of(log, 1, 2) == Window(1.0, 3.5)
    assert window_of(log, 0, 1) == Window(0.5, 1.5)


def test_the_window_ends_when_a_fast_worker_has_nothing_to_do():
    log = log_of({0: [1.0, 2.0, 3.0, 4.0], 1: [3.0, 6.0, 9.0, 12.0]})
    assert window_of(log, 0, 2) == Window(0.5, 4.0)


def test_steps_count_from_the_first_one_recorded():
    """Of a run that was resumed at step 20."""
    steps = [StepEnd(rank, 20 + k, 1.0 + k) for rank in (0, 1) for k in range(4)]
    log = SpanLog(2, 2, [Span(0, "compute", "gradient", 0.5, 1.0)], steps)
    assert window_of(log, 1, 2) == Window(1.0, 3.0)


def test_a_worker_that_left_out_a_step():
    steps = [StepEnd(0, k, 1.0 + k) for k in range(4)]
    steps += [StepEnd(1, k, 1.5 + k) for k in (0, 1, 3)]
    assert window_of(SpanLog(2, 2, [], steps), 1, 2) == Window(1.0, 4.0)


def test_steps_that_were_not_recorded_are_refused():
    with pytest.raises(ValueError, match="need 5 steps, but this recording has 4"):
        window_of(log_of({0: [1.0, 2.0, 3.0, 4.0]}), 3, 2)
    with pytest.raises(ValueError, match="no worker has finished a step"):
        window_of(SpanLog(1, 1), 0, 1)
