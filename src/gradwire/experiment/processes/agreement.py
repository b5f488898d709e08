"""What the nodes of a run on real processes agree on between two segments.

Everyone sends a report to the one that keeps the record (rank 0, or the scheduler if there is one),
that one decides, everyone receives the decision: JSON both ways. It goes through the engine like
any message, but it is not the algorithm's: neither the ledger nor a recorded order knows of it.
Nodes wait patiently: others may still have to load, to evaluate, to save, or to train.
"""

import json
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.core.errors import PeerLost
from gradwire.core.node import Node
from gradwire.experiment.run.record import Row
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.process.engine import ProcessEngine

R = TypeVar("R")
_REPORT, _DECISION, _TENSOR = "agreement report", "agreement decision", "agreement tensor"


class Agreement:
    """One node's end. All nodes of a run, whatever their roles, call the same things in order.

    `hub` is the rank that decides. Workers that are lost may be missing if `may_miss`.
    """

    def __init__(self, engine: ProcessEngine, hub: int = 0, may_miss: bool = False) -> None:
        self._engine = engine
        self._hub = hub
        self._others = [rank for rank in range(engine.size) if rank != hub]
        self._may_miss = may_miss
        self.absent: set[int] = set()  # workers that came meanwhile, and take no part

    def agree(self, report: Row, decide: Callable[[list[Row | None]], Row]) -> Row:
        """What the hub decides given all reports, in the order of the ranks; None: it is lost."""
        hub = self._hub

        async def program(node: Node) -> Row:
            if node.rank != hub:
                await node.send(hub, _REPORT, _packed(report))
                return _unpacked(await node.recv(hub, _DECISION))
            reports: list[Row | None] = [None] * self._engine.size
            reports[hub] = report
            for rank in self._others:
                received = await self._received(node, rank, _REPORT)
                reports[rank] = None if received is None else _unpacked(received)
            decision = decide(reports)
            message = _packed(decision)
            for rank in self._others:
                if rank not in self.absent:
                    await node.send(rank, _DECISION, message)
            return decision

        return self._run(program)

    def collect(
        self, tensors: Sequence[Tensor], sources: Collection[int], count: int
    ) -> dict[int, list[Tensor]]:
        """On the hub the tensors of these ranks, of which each has `count`; elsewhere nothing."""
        hub = self._hub

        async def program(node: Node) -> dict[int, list[Tensor]]:
            if node.rank != hub:
                if node.rank in sources:
                    for tensor in tensors:
                        await node.send(hub, _TENSOR, tensor)
                return {}
            found = {hub: list(tensors)} if hub in sources else {}
            for rank in sorted(set(sources) - {hub}):
                received = [await self._received(node, rank, _TENSOR) for _ in range(count)]
                whole = [tensor for tensor in received if tensor is not None]
                if len(whole) == count:
                    found[rank] = whole
            return found

        return self._run(program)

    async def _received(self, node: Node, rank: int, tag: str) -> Tensor | None:
        if rank in self.absent:
            return None
        try:
            return await node.recv(rank, tag)
        except PeerLost:
            if not self._may_miss or rank >= node.size:
                raise
            return None

    def _run(self, program: Callable[[Node], Coroutine[Any, Any, R]]) -> R:
        engine = self._engine
        ledger, received, log = engine.ledger, engine.received, engine.log
        engine.ledger, engine.received, engine.log = Ledger(engine.size), Ledger(engine.size), None
        try:
            result = engine.run(program, serves=False, is_patient=True)
        finally:
            engine.ledger, engine.received, engine.log = ledger, received, log
        assert result is not None, "a node did not receive the decision"
        return result


def _packed(row: Row) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)


def _unpacked(message: Tensor) -> Row:
    row: Row = json.loads(bytes(message.numpy()))
    return row
