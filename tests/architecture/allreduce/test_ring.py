"""Patarasuk and Yuan 2009: 2(n-1)(a + bN/n), between neighbours only."""

import pytest
import torch

from gradwire.architecture.allreduce.ring import Ring
from gradwire.core.node import Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from sampling import sizes


@pytest.mark.parametrize("size", sizes(range(1, 18)))
@pytest.mark.parametrize("bandwidth", [1e6, 125e6, 1.25e9])
@pytest.mark.parametrize("latency_s", [0.0, 50e-6, 1e-3])
def test_an_all_reduce_takes_the_time_of_the_formula(
    all_reduce, size, bandwidth, latency_s
) -> None:
    size_bytes = 1000 * size
    engine = all_reduce(Ring(), size, size_bytes, latency_s, bandwidth)
    expected = 2 * (size - 1) * (latency_s + size_bytes / (size * bandwidth))
    assert engine.now == pytest.approx(expected, rel=1e-9)
    assert engine.clocks == pytest.approx([expected] * size, rel=1e-9)


@pytest.mark.parametrize("size", sizes(range(1, 18)))
def test_every_rank_sends_twice_the_vector_less_two_shares(all_reduce, size) -> None:
    engine = all_reduce(Ring(), size, 1000 * size)
    for rank in range(size):
        assert engine.ledger.sent_by(rank) == 2 * (size - 1) * 1000
        assert engine.ledger.received_by(rank) == 2 * (size - 1) * 1000


@pytest.mark.parametrize("size", range(2, 10))
def test_ranks_send_to_their_right_neighbour_only(all_reduce, size) -> None:
    engine = all_reduce(Ring(), size, 400)
    for rank in range(size):
        for other in range(size):
            used = engine.ledger.link_messages[rank][other]
            assert used == (2 * (size - 1) if other == (rank + 1) % size else 0)


def test_a_slow_node_slows_everyone() -> None:
    async def program(node: Node) -> None:
        await Ring().group(node, "x").mean(torch.ones(400))

    engine = VirtualEngine(Network((0.0,) * 4, (1e6, 1e6, 1e5, 1e6)))
    engine.run([program] * 4)
    # Six chunks of 400 bytes pass the slow node one after the other.
    assert engine.now == pytest.approx(6 * 400 / 1e5, rel=0.01)
