"""One all-reduce on a uniform network."""

from collections.abc import Callable

import pytest
import torch

from gradwire.core.node import Node
from gradwire.core.protocols import Architecture
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

All = Callable[..., VirtualEngine]


@pytest.fixture
def all_reduce() -> All:
    def run(
        architecture: Architecture,
        size: int,
        size_bytes: int,
        latency_s: float = 0.0,
        bandwidth: float = 1e6,
    ) -> VirtualEngine:
        assert size_bytes % 4 == 0
        x = torch.ones(size_bytes // 4)

        async def program(node: Node) -> None:
            await architecture.group(node, "x").mean(x)

        engine = VirtualEngine(Network((latency_s,) * size, (bandwidth,) * size))
        engine.run([program] * size)
        return engine

    return run


@pytest.fixture(params=[0.0, 0.3, 1.0, 2.5, 40.0], ids=lambda a: f"latency={a}")
def latency(request) -> float:
    """In units of the time that the vector takes."""
    return request.param
