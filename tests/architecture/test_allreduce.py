"""Direct exchange: 2(a + (n-1)/n s/B)."""

import pytest
import torch

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.allreduce import AllReduce
from gradwire.core.errors import NotationError
from gradwire.core.node import Node
from gradwire.runtime.network import Network
from gradwire.runtime.virtual import VirtualEngine


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("bandwidth", [1e6, 125e6, 1.25e9])
@pytest.mark.parametrize("latency_s", [0.0, 50e-6, 1e-3])
def test_an_all_reduce_takes_the_time_of_the_formula(size, bandwidth, latency_s) -> None:
    numel = 250 * size

    async def program(node: Node) -> None:
        await AllReduce().group(node, "x").mean(torch.ones(numel))

    engine = VirtualEngine(Network((latency_s,) * size, (bandwidth,) * size))
    engine.run([program] * size)
    expected = 2 * (latency_s + (size - 1) / size * 4 * numel / bandwidth) if size > 1 else 0.0
    assert engine.now == pytest.approx(expected, rel=1e-9)
    assert engine.clocks == pytest.approx([expected] * size, rel=1e-9)


def test_the_route_is_handed_to_the_group() -> None:
    for route in ("auto", "gather", "scatter"):
        assert AllReduce(route).group(Node(0, 2), "x").route == route
        assert ARCHITECTURE.parse(f'allreduce("{route}")') == AllReduce(route)


def test_another_route_is_refused() -> None:
    with pytest.raises(ValueError, match="route"):
        AllReduce("ring")
    with pytest.raises(NotationError, match='one of "auto", "gather", "scatter"'):
        ARCHITECTURE.parse("allreduce('ring')")


def test_every_architecture_reads_back_from_what_it_writes() -> None:
    for cls in ARCHITECTURE:
        for text in cls.examples or (repr(cls()),):
            architecture = ARCHITECTURE.parse(text)
            assert ARCHITECTURE.parse(repr(architecture)) == architecture
