"""Agreements between the nodes of a run on real processes, between two segments.

Every node sends a report to the coordinator (the scheduler, or rank 0 if there is none). The
coordinator decides, and all nodes receive the decision. Reports and decisions are JSON. The engine
transmits them like any message, but they count neither in the ledger nor in a recorded order. Nodes
wait without the usual timeout: others may still load, evaluate, save or train.
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
    """One node's side. All nodes of a run, whatever their roles, call the same methods in order.

    `may_miss`: workers that are lost may be missing.
    """

    def __init__(self, engine: ProcessEngine, coordinator: int, may_miss: bool = False) -> None:
        self._engine = engine
        self._coordinator = coordinator
        self._others = [rank for rank in range(engine.size) if rank != coordinator]
        self._may_miss = may_miss
        self.absent: set[int] = set()  # workers that joined meanwhile, and do not participate

    @property
    def coordinator(self) -> int:
        return self._coordinator

    def agree(self, report: Row, decide: Callable[[list[Row | None]], Row]) -> Row:
        """The coordinator's decision, given the reports of all ranks in order; None: lost."""
        coordinator = self._coordinator

        async def program(node: Node) -> Row:
            if node.rank != coordinator:
                await node.send(coordinator, _REPORT, _pack(report))
                return _unpack(await node.recv(coordinator, _DECISION))
            reports: list[Row | None] = [None] * self._engine.size
            reports[coordinator] = report
            for rank in self._others:
                received = await self._receive(node, rank, _REPORT)
                reports[rank] = None if received is None else _unpack(received)
            decision = decide(reports)
            message = _pack(decision)
            for rank in self._others:
                if rank not in self.absent:
                    await node.send(rank, _DECISION, message)
            return decision

        return self.run_uncounted(program)

    def collect(
        self, tensors: Sequence[Tensor], sources: Collection[int], count: int
    ) -> dict[int, list[Tensor]]:
        """On the coordinator: the `count` tensors of each of these ranks; elsewhere nothing."""
        coordinator = self._coordinator

        async def program(node: Node) -> dict[int, list[Tensor]]:
            if node.rank != coordinator:
                if node.rank in sources:
                    for tensor in tensors:
                        await node.send(coordinator, _TENSOR, tensor)
                return {}
            found = {coordinator: list(tensors)} if coordinator in sources else {}
            for rank in sorted(set(sources) - {coordinator}):
                received = [await self._receive(node, rank, _TENSOR) for _ in range(count)]
                complete = [tensor for tensor in received if tensor is not None]
                if len(complete) == count:
                    found[rank] = complete
            return found

        return self.run_uncounted(program)

    async def _receive(self, node: Node, rank: int, tag: str) -> Tensor | None:
        if rank in self.absent:
            return None
        try:
            return await node.recv(rank, tag)
        except PeerLost:
            if not self._may_miss or rank >= node.size:
                raise
            return None

    def run_uncounted(self, program: Callable[[Node], Coroutine[Any, Any, R]]) -> R:
        """Runs a program on all nodes that is no part of the training."""
        engine = self._engine
        ledger, received, log = engine.ledger, engine.received, engine.log
        call_s, spans = dict(engine.call_s), engine.spans
        engine.ledger, engine.received, engine.log = Ledger(engine.size), Ledger(engine.size), None
        engine.spans = None
        try:
            result = engine.run(program, serves=False, is_patient=True)
        finally:
            engine.ledger, engine.received, engine.log = ledger, received, log
            engine.spans = spans
            engine.call_s.clear()
            engine.call_s.update(call_s)
        assert result is not None, "a node did not receive the decision"
        return result


def _pack(row: Row) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)


def _unpack(message: Tensor) -> Row:
    row: Row = json.loads(bytes(message.numpy()))
    return row
