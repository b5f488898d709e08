"""Workers that minimise quadratics f_i(x) = a_i / 2 |x - b_i|^2 with exact gradients, by gossip."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.gossip.gossip import Gossip
from gradwire.architecture.graphs import Graph
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.protocols import Replica, Synchronization
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.synchronization import SYNCHRONIZATION


@dataclass
class Outcome:
    """What came out of a run."""

    params: Tensor  # [n, d], of those that are there at the end
    replicas: list[Replica | None]
    engine: VirtualEngine
    mixings: dict[int, Any]
    history: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (rank, step) -> params


class _Worker:
    """As much of `core.protocols.Worker` as synchronization among neighbours needs."""

    def __init__(self, world: "_World", node: Node) -> None:
        self.node, self.rank, self.size = node, node.rank, node.size
        self.num_steps = world.num_steps
        self.ability = world.gossip.offers[0]
        self.world = world
        self.mixing = world.gossip.mixing(node, world.reducer, Key(7))

    async def gradient(self, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        return await self.node.compute((self.rank, step, replica.params)), replica

    async def update(
        self, replica: Replica, gradient: Tensor, step: int, *, shared: bool
    ) -> Replica:
        return replica.having(params=replica.params - self.world.lr * gradient)


class _World:
    def __init__(
        self,
        gossip: str | Gossip,
        starts: Tensor | None = None,
        *,
        steps: int,
        lr: float = 0.0,
        a: Tensor | None = None,
        b: Tensor | None = None,
        compression: str = "identity",
        synchronization: str = "bsp",
        kicks: Tensor | None = None,  # [n, d]: the walks of step 0; then there are none
        latency: str = "1ms",
        bandwidth: str = "1Gbit",
        seconds: Callable[[int, int], float] = lambda rank, step: 0.0,
        faults: Sequence[str] = (),
        record: bool = False,
        cuts: Sequence[int] = (),
    ) -> None:
        if starts is None:  # all begin with zero
            source = b if kicks is None else kicks
            assert source is not None
            starts = torch.zeros_like(source)
        self.num_workers = len(starts)
        parsed = ARCHITECTURE.parse(gossip) if isinstance(gossip, str) else gossip
        assert isinstance(parsed, Gossip)
        self.gossip = parsed
        self.gossip.check(self.num_workers)
        self.reducer = lift(COMPRESSION.parse(compression))
        self.gossip.check_compression(self.reducer, Spec.of(starts[0]))
        self.synchronization: Synchronization = SYNCHRONIZATION.parse(synchronization)
        self.starts, self.num_steps, self.kicks = starts, steps, kicks
        self.lr = lr if kicks is None else 1.0
        self.a = torch.ones(self.num_workers, dtype=starts.dtype) if a is None else a
        self.b = starts if b is None else b
        self.mixings: dict[int, Any] = {}
        self.history: dict[tuple[int, int], Tensor] = {}
        self.cuts = [*cuts, steps]
        network = Network.uniform(self.num_workers, bandwidth, latency)
        self.engine = VirtualEngine(
            network,
            evaluate=self._evaluate,
            seconds=lambda rank, request: seconds(rank, request[1]),
            faults=faults,
            heartbeat_s=0.01,
            record=record,
        )

    def _evaluate(self, requests: Sequence[tuple[int, int, Tensor]]) -> list[Tensor]:
        if self.kicks is not None:
            return [-self.kicks[rank] * (step == 0) for rank, step, _ in requests]
        return [self.a[rank] * (x - self.b[rank]) for rank, _, x in requests]

    def initial(self, rank: int) -> Replica:
        params = self.starts[rank].clone()
        memory = {**self.synchronization.memory(params), **self.gossip.memory(params)}
        state = self.reducer.init(Spec.of(params), self.num_workers)
        return Replica(params, {}, {}, (state,), memory)

    async def train(self, worker: _Worker, replica: Replica, first: int, last: int) -> Replica:
        self.mixings[worker.rank] = worker.mixing
        for step in range(first, last):
            replica = await self.synchronization.step(worker, replica, step)  # type: ignore[arg-type]
            self.history[worker.rank, step] = replica.params
        return replica

    def run(self) -> Outcome:
        replicas: list[Replica | None] = [self.initial(rank) for rank in range(self.num_workers)]
        first = 0
        for last in self.cuts:
            replicas = self._segment(replicas, first, last)
            first = last
        params = torch.stack([replica.params for replica in replicas if replica is not None])
        return Outcome(params, replicas, self.engine, self.mixings, self.history)

    def _segment(
        self, replicas: list[Replica | None], first: int, last: int
    ) -> list[Replica | None]:
        async def program(node: Node) -> Replica:
            replica = replicas[node.rank]
            assert replica is not None
            return await self.train(_Worker(self, node), replica, first, last)

        async def rejoin(node: Node) -> Replica:
            worker = _Worker(self, node)
            replica, begin = await worker.mixing.rejoin(self.initial(node.rank))
            return await self.train(worker, replica, begin, last)

        return self.engine.run([program] * self.num_workers, rejoin=rejoin)


@pytest.fixture
def train() -> Callable[..., Outcome]:
    def run(gossip: str | Gossip, starts: Tensor | None = None, **settings: Any) -> Outcome:
        return _World(gossip, starts, **settings).run()

    return run


@pytest.fixture
def vectors() -> Callable[[int, int], Tensor]:
    """Different vectors of n workers, [n, d] in float64."""

    def draw(num_workers: int, numel: int = 6) -> Tensor:
        flat = Key(3).child("starts").normal(num_workers * numel)
        return flat.reshape(num_workers, numel).double()

    return draw


class _Given(Graph):
    def __init__(self, *rows: Sequence[float]) -> None:
        self.rows = rows

    def __repr__(self) -> str:
        return "given"

    def matrix(self, size: int, step: int = 0) -> Tensor:
        return torch.tensor(self.rows, dtype=torch.float64)

    def weights(self, size: int, step: int) -> Tensor:
        raise NotImplementedError


@pytest.fixture
def given() -> type[Graph]:
    """A graph of given rows."""
    return _Given


@pytest.fixture
def path() -> Graph:
    """0 - 1 - 2."""
    third = 1 / 3
    return _Given([2 * third, third, 0.0], [third, third, third], [0.0, third, 2 * third])
