"""Direct exchange, 2(a + (n-1)/n bN), or everything to everyone, a + (n-1)bN."""

import pytest
import torch
from torch import Tensor

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.core.errors import NotationError
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from sampling import sizes

DIRECT, GATHER = AllReduce(algorithm="direct"), AllReduce(algorithm="gather")


@pytest.mark.parametrize("size", sizes(range(1, 18)))
@pytest.mark.parametrize("bandwidth", [1e6, 1.25e9])
@pytest.mark.parametrize("latency_s", [0.0, 50e-6, 1e-3])
def test_an_all_reduce_takes_the_time_of_the_formula(
    all_reduce, size, bandwidth, latency_s
) -> None:
    size_bytes = 1000 * size
    direct = 2 * (latency_s + (size - 1) * 1000 / bandwidth) if size > 1 else 0.0
    gather = latency_s + (size - 1) * size_bytes / bandwidth if size > 1 else 0.0
    for architecture, expected in (
        (DIRECT, direct),
        (GATHER, gather),
        (AllReduce(), direct if size > 2 else gather),
    ):
        engine = all_reduce(architecture, size, size_bytes, latency_s, bandwidth)
        assert engine.now == pytest.approx(expected, rel=1e-9)
        assert engine.clocks == pytest.approx([expected] * size, rel=1e-9)


@pytest.mark.parametrize("size", sizes(range(1, 18)))
def test_every_rank_sends_twice_the_vector_less_two_shares(all_reduce, size) -> None:
    for architecture in (DIRECT, AllReduce()):
        ledger = all_reduce(architecture, size, 1000 * size).ledger
        for rank in range(size):
            assert ledger.sent_by(rank) == ledger.received_by(rank) == 2 * (size - 1) * 1000


@pytest.mark.parametrize("size", sizes(range(1, 18)))
def test_or_all_of_it_to_everyone(all_reduce, size) -> None:
    ledger = all_reduce(GATHER, size, 1000).ledger
    for rank in range(size):
        assert ledger.sent_by(rank) == ledger.received_by(rank) == (size - 1) * 1000


@pytest.mark.parametrize("size", range(3, 10))
def test_what_is_shorter_than_the_group_takes_one_latency(all_reduce, size) -> None:
    assert all_reduce(AllReduce(), size, 4 * (size - 1), 1.0, 1e9).now == pytest.approx(1.0)
    assert all_reduce(AllReduce(), size, 4 * size, 1.0, 1e9).now == pytest.approx(2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_both_ways_give_the_same_bits(size, dtype) -> None:
    def mean(architecture: AllReduce) -> list[Tensor]:
        async def program(node: Node) -> Tensor:
            x = Key(5).private(node.rank).normal(100).to(dtype)
            return await architecture.group(node, "x").mean(x)

        return VirtualEngine(Network.uniform(size)).run([program] * size)

    for direct, gathered, picked in zip(mean(DIRECT), mean(GATHER), mean(AllReduce())):
        assert torch.equal(direct, gathered)
        assert torch.equal(direct, picked)


def test_the_route_is_handed_to_the_group() -> None:
    for route in ("auto", "gather", "scatter"):
        assert AllReduce(route).group(Node(0, 2), "x").route == route
        assert ARCHITECTURE.parse(f'allreduce("{route}")') == AllReduce(route)


def test_another_route_or_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="route"):
        AllReduce("ring")
    with pytest.raises(NotationError, match='one of "auto", "gather", "scatter"'):
        ARCHITECTURE.parse("allreduce('ring')")
    with pytest.raises(ValueError, match="algorithm"):
        AllReduce(algorithm="ring")
    with pytest.raises(NotationError, match='one of "auto", "direct", "gather"'):
        ARCHITECTURE.parse("allreduce(algorithm='ring')")


def test_every_architecture_reads_back_from_what_it_writes() -> None:
    for cls in ARCHITECTURE:
        for text in cls.examples or (repr(cls()),):
            architecture = ARCHITECTURE.parse(text)
            assert ARCHITECTURE.parse(repr(architecture)) == architecture
