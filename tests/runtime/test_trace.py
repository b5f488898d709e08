"""Recorded runs, played again on other networks."""

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.coding_time import MeasuredCoding
from gradwire.runtime.virtual.engine import VirtualEngine

NETWORKS = [
    Network.uniform(4, "1Gbit", "50us"),
    Network.uniform(4, "10Mbit", "5ms"),
    Network.uniform(4, "100Gbit", "0s"),
    Network.parse(4, "1Gbit,10Mbit,1Gbit,100Mbit", "1ms,2ms,3ms,0s"),
]


def training(architecture):
    """Computes, exchanges two tensors at once, pauses; messages of unequal sizes."""

    async def exchange(node: Node, label: str, numel: int) -> None:
        group = architecture.group(node, label)
        await group.mean(torch.ones(numel))
        await group.all_gather(torch.ones(10 * (node.rank + 1)))

    async def program(node: Node) -> None:
        for step in range(4):
            await node.compute((node.rank, step))
            task = await node.spawn(exchange(node, "first", 1000))
            await exchange(node, "second", 5000)
            await node.join(task)
            await node.call(sum, (1, 2))
            await node.sleep(0.001 * ((node.rank + step) % 3))

    return program


def seconds(rank: int, request: tuple[int, int]) -> float:
    return float(Key(3).at(request[1]).private(rank).uniform64(1)) * 0.02


def engine(network: Network, record: bool = False) -> VirtualEngine:
    return VirtualEngine(
        network, evaluate=lambda requests: requests, seconds=seconds, record=record
    )


@pytest.fixture(params=[AllReduce(), Ring()], ids=repr)
def recorded(request) -> VirtualEngine:
    recording = engine(NETWORKS[0], record=True)
    recording.run([training(request.param)] * 4)
    recording.program = training(request.param)
    return recording


def test_a_replay_on_the_same_network_takes_exactly_the_same_time(recorded) -> None:
    assert recorded.trace.replayable
    again = VirtualEngine(NETWORKS[0])
    again.run([recorded.trace.replay] * 4)
    assert again.clocks == recorded.clocks
    assert again.now > 0.01


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_a_replay_on_another_network_takes_the_time_of_a_run_there(recorded, network) -> None:
    direct = engine(network)
    direct.run([recorded.program] * 4)
    replayed = VirtualEngine(network)
    replayed.run([recorded.trace.replay] * 4)
    assert replayed.clocks == direct.clocks


def test_a_replay_sends_the_same_bytes_and_computes_nothing(recorded) -> None:
    again = VirtualEngine(NETWORKS[1])  # without an evaluator
    again.run([recorded.trace.replay] * 4)
    assert again.ledger.snapshot() == recorded.ledger.snapshot()


def test_a_replay_can_be_played_any_number_of_times(recorded) -> None:
    times = set()
    for _ in range(3):
        again = VirtualEngine(NETWORKS[1])
        again.run([recorded.trace.replay] * 4)
        times.add(again.now)
    assert len(times) == 1


def test_a_replay_keeps_no_tensors(recorded) -> None:
    for steps in recorded.trace._programs:
        for step in steps:
            assert getattr(step, "data", None) is None


def test_charged_work_is_part_of_the_trace() -> None:
    async def program(node: Node) -> None:
        await node.call(sum, range(100_000))

    recording = VirtualEngine(NETWORKS[0], coding=MeasuredCoding(), record=True)
    recording.run([program] * 4)
    again = VirtualEngine(NETWORKS[0])
    again.run([recording.trace.replay] * 4)
    assert again.clocks == recording.clocks
    assert again.now > 0


async def asks_the_time(node: Node) -> None:
    await node.now()


async def takes_from_anyone(node: Node) -> None:
    await node.send((node.rank + 1) % 4, "x", torch.ones(1))
    await node.recv_any("x")


async def does_neither(node: Node) -> None:
    await node.send((node.rank + 1) % 4, "x", torch.ones(1))
    await node.recv((node.rank - 1) % 4, "x")


@pytest.mark.parametrize(
    ("program", "replayable"),
    [(asks_the_time, False), (takes_from_anyone, False), (does_neither, True)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_programs_that_depend_on_time_are_marked(program, replayable) -> None:
    recording = VirtualEngine(NETWORKS[0], record=True)
    recording.run([program] * 4)
    assert recording.trace.replayable is replayable


def test_one_rank_that_depends_on_time_is_enough() -> None:
    recording = VirtualEngine(NETWORKS[0], record=True)
    recording.run([does_neither] * 3 + [takes_from_anyone])
    assert not recording.trace.replayable


def test_nothing_is_recorded_unless_asked_for() -> None:
    silent = VirtualEngine(NETWORKS[0])
    silent.run([does_neither] * 4)
    assert silent.trace is None
