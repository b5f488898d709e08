"""Spans that the simulator records."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from gradwire.core.coded import MeanOfCoded
from gradwire.core.node import Call, Node
from gradwire.core.profile import Profile
from gradwire.core.replica import Bucket
from gradwire.experiment.run.config import Config
from gradwire.experiment.timeline.analysis import critical_path, path_seconds, window_of
from gradwire.experiment.timeline.recording import record_simulated
from gradwire.runtime.network.network import Network
from gradwire.runtime.spans import Span, SpanLog, describe_call
from gradwire.runtime.virtual.coding_time import CodingTime
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.runtime.virtual.spans import VirtualSpans
from gradwire.training.optimizer import clipped_update

LAYERS = (Bucket("a", 0, 1), Bucket("b", 1, 3))
PROFILE = Profile(LAYERS, forward_s=(1.0, 2.0), backward_s=(3.0, 4.0))  # 10 in all
KILOBYTE = torch.zeros(1000, dtype=torch.uint8)


class OneSecond(CodingTime):
    meters = False

    def seconds(self, call: Call, result, work, taken_s) -> float:
        return 1.0


def recorded(program, num_nodes: int = 2, **settings) -> SpanLog:
    network = Network((0.5,) * num_nodes, (1000.0,) * num_nodes)  # a kilobyte takes 1 s
    log = SpanLog(num_nodes, num_nodes)
    engine = VirtualEngine(
        network,
        evaluate=lambda requests: requests,
        seconds=lambda rank, request: 10.0,
        coding=OneSecond(),
        **settings,
    )
    layers = [layer.name for layer in LAYERS]
    engine.run([program] * num_nodes, spans=VirtualSpans(log, network, layers))
    return log


def encode(x):
    return x


def test_gradients_calls_and_messages():
    async def program(node: Node) -> None:
        if node.rank == 0:
            await node.compute("request")
            payload = await node.call(encode, KILOBYTE)
            await node.send(1, "tag", payload, "fc1")
            await node.send(1, "tag", payload, "fc2")
        else:
            await node.recv(0, "tag")
            await node.recv(0, "tag")

    log = recorded(program)
    assert log.spans == [
        Span(0, "compute", "gradient", 0.0, 10.0),
        Span(0, "encode", "encode", 10.0, 11.0),
        Span(0, "send", "fc1 to 1", 11.0, 12.0, 0, 11.0),
        Span(1, "receive", "fc1 from 0", 11.5, 12.5, 0, 11.5),
        Span(0, "send", "fc2 to 1", 12.0, 13.0, 1, 11.0),
        Span(1, "receive", "fc2 from 0", 12.5, 13.5, 1, 12.5),
    ]


def test_layers_of_a_gradient():
    async def program(node: Node) -> None:
        begun = await node.begin("request")
        await node.reach(begun, 0)

    log = recorded(program, 1, profile=PROFILE)
    assert [(span.name, span.start_s, span.end_s) for span in log.spans] == [
        ("forward a", 0.0, pytest.approx(1.0)),
        ("forward b", pytest.approx(1.0), pytest.approx(3.0)),
        ("backward b", pytest.approx(3.0), pytest.approx(7.0)),
        ("backward a", pytest.approx(7.0), pytest.approx(10.0)),
    ]


def test_a_forward_pass_that_waits_for_its_parameters():
    async def open_later(node: Node, begun) -> None:
        await node.open(begun, 0)
        await node.sleep(5.0)
        await node.open(begun, 1, "request")

    async def program(node: Node) -> None:
        begun = await node.begin(None, is_open=False)
        await node.spawn(open_later(node, begun))
        await node.reach(begun, 0)

    log = recorded(program, 1, profile=PROFILE)
    assert [(span.name, span.start_s, span.end_s) for span in log.spans] == [
        ("forward a", 0.0, pytest.approx(1.0)),
        ("forward b", pytest.approx(5.0), pytest.approx(7.0)),
        ("backward b", pytest.approx(7.0), pytest.approx(11.0)),
        ("backward a", pytest.approx(11.0), pytest.approx(14.0)),
    ]


def test_messages_queue_at_their_receiver():
    async def program(node: Node) -> None:
        if node.rank:
            await node.send(0, "tag", KILOBYTE, "x")
        else:
            await node.recv(1, "tag")
            await node.recv(2, "tag")

    log = recorded(program, 3)
    received = [span for span in log.spans if span.lane == "receive"]
    assert [(span.start_s, span.end_s, span.ready_s) for span in received] == [
        (0.5, 1.5, 0.5),
        (1.5, 2.5, 0.5),
    ]


def test_functions_have_lanes():
    assert describe_call(encode) == ("encode", "encode")
    assert describe_call(partial(clipped_update, 1)) == ("update", "clipped_update")
    assert describe_call(MeanOfCoded.run) == ("decode", "MeanOfCoded")
    assert describe_call(torch.add) == ("other", "add")


def test_a_log_changes_nothing():
    def times(spans: bool) -> list[float]:
        network = Network.uniform(4, "1Gbit")
        engine = VirtualEngine(network, evaluate=lambda requests: requests)

        async def program(node: Node) -> None:
            for _ in range(3):
                await node.send((node.rank + 1) % 4, "x", KILOBYTE)
                await node.recv((node.rank - 1) % 4, "x")

        engine.run([program] * 4, spans=VirtualSpans(SpanLog(4, 4), network) if spans else None)
        return engine.clocks

    assert times(True) == times(False)


SMALL = Config(model="mlp((16,))", workers=2, compute="fixed(0.001)", batch_size=4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduling": "wfbp", "compression": "ef(topk(0.1))"},
        {"scheduling": "priority"},
        {"architecture": "parameter_server", "synchronization": "asp"},
        {"topology": "racks(2)"},
        {"faults": ("loss(0.2)",)},
    ],
)
def test_the_critical_path_fills_the_window(settings):
    """Every moment of a run is on the path once, and most of them are explained."""
    log = record_simulated(Config(**{**vars(SMALL), **settings}), 3)
    window = window_of(log, 1, 2)
    path = critical_path(log.spans, window)
    assert path[0].start_s == pytest.approx(window.start_s)
    assert path[-1].end_s == pytest.approx(window.end_s)
    for before, after in pairwise(path):
        assert before.end_s == pytest.approx(after.start_s)
    seconds = path_seconds(path)
    assert sum(seconds.values()) == pytest.approx(window.seconds)
    assert seconds["compute"] > 0
    if not settings.get("faults"):
        assert seconds["idle"] < 0.01 * window.seconds
