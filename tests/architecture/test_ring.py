"""Patarasuk and Yuan 2009: 2(n-1)(a + s/(nB)), between neighbours only."""

import pytest
import torch

from gradwire.architecture.ring import Ring
from gradwire.core.node import Node
from gradwire.runtime.network import Network
from gradwire.runtime.virtual import VirtualEngine


def run(size: int, bandwidth: float, latency_s: float, numel: int) -> VirtualEngine:
    async def program(node: Node) -> None:
        await Ring().group(node, "x").mean(torch.ones(numel))

    engine = VirtualEngine(Network((latency_s,) * size, (bandwidth,) * size))
    engine.run([program] * size)
    return engine


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("bandwidth", [1e6, 125e6, 1.25e9])
@pytest.mark.parametrize("latency_s", [0.0, 50e-6, 1e-3])
def test_an_all_reduce_takes_the_time_of_the_formula(size, bandwidth, latency_s) -> None:
    numel = 250 * size
    engine = run(size, bandwidth, latency_s, numel)
    expected = 2 * (size - 1) * (latency_s + 4 * numel / (size * bandwidth))
    assert engine.now == pytest.approx(expected, rel=1e-9)
    assert engine.clocks == pytest.approx([expected] * size, rel=1e-9)


@pytest.mark.parametrize("size", range(2, 10))
def test_ranks_send_to_their_right_neighbour_only(size) -> None:
    engine = run(size, 1e6, 0.0, 100)
    for rank in range(size):
        for other in range(size):
            used = engine.ledger.link_messages[rank][other]
            assert used == (2 * (size - 1) if other == (rank + 1) % size else 0)


def test_alone_it_takes_no_time() -> None:
    engine = run(1, 1e6, 1.0, 100)
    assert engine.now == 0.0
    assert engine.ledger.total_messages == 0


def test_a_slow_node_slows_everyone() -> None:
    async def program(node: Node) -> None:
        await Ring().group(node, "x").mean(torch.ones(400))

    engine = VirtualEngine(Network((0.0,) * 4, (1e6, 1e6, 1e5, 1e6)))
    engine.run([program] * 4)
    # Six chunks of 400 bytes pass the slow node one after the other.
    assert engine.now == pytest.approx(6 * 400 / 1e5, rel=0.01)
