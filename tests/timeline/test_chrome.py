"""Chrome traces: the structure that Perfetto expects."""

import json
from collections import defaultdict

from gradwire.experiment.timeline.chrome import chrome_trace, node_name
from gradwire.runtime.spans import Span, SpanLog

SPANS = [
    Span(0, "compute", "forward fc1", 0.001, 0.003),
    Span(0, "send", "a to 1", 0.003, 0.006, 0),
    Span(0, "send", "b to 1", 0.004, 0.005, 1),  # at the same time, over another link
    Span(2, "decode", "decode", 0.006, 0.007),
]
LOG = SpanLog(2, 4, SPANS)


def test_events_have_what_the_format_demands():
    trace = json.loads(json.dumps(chrome_trace(LOG, SPANS)))
    assert trace["displayTimeUnit"] == "ms"
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in complete] == [span.name for span in SPANS]
    for event, span in zip(complete, SPANS, strict=True):
        assert (event["pid"], event["cat"]) == (span.rank, span.lane)
        assert isinstance(event["tid"], int)
    assert (complete[0]["ts"], complete[0]["dur"]) == (1000.0, 2000.0)  # microseconds


def test_every_process_and_thread_has_a_name():
    events = chrome_trace(LOG, SPANS)["traceEvents"]
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    for event in events:
        if event["ph"] == "X":
            assert names["thread_name", event["pid"], event["tid"]] == event["cat"]
    processes = [name for (kind, _, _), name in names.items() if kind == "process_name"]
    assert processes == ["worker 0", "worker 1", "server 0", "scheduler"]


def test_events_of_a_thread_do_not_overlap():
    ends: defaultdict[tuple[int, int], float] = defaultdict(float)
    for event in chrome_trace(LOG, SPANS)["traceEvents"]:
        if event["ph"] == "X":
            thread = event["pid"], event["tid"]
            assert event["ts"] >= ends[thread]
            ends[thread] = event["ts"] + event["dur"]


def test_names_of_nodes():
    assert [node_name(SpanLog(1, 2), rank) for rank in range(2)] == ["worker 0", "server 0"]
