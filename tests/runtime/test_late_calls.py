"""Calls evaluated together: the results, virtual times and bytes of one call after another."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.core.batched import Elementwise, batched
from gradwire.core.node import Node
from gradwire.experiment.run.outcome import Run
from gradwire.runtime.interpreter.calls import Calls
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.coding_time import Cost, CostTable, MeasuredCoding, ModelledCoding
from gradwire.runtime.virtual.engine import VirtualEngine

METHODS: dict[str, dict[str, Any]] = {
    "bsp": {},
    "bsp, clipped, accumulated": {"clip_norm": 0.5, "accumulate": 2},
    "momentum before compression": {
        "compression": "velocity(ef(topk(0.05)))",
        "compute": "lognormal(0.01)",
    },
    "sign": {"compression": "ef(sign)", "what_if": ("10Gbit",)},
    "ring": {"architecture": "ring"},
    "localsgd, cosine": {
        "synchronization": "localsgd(4)",
        "optimizer": "sgd(0.1, momentum=0.9, weight_decay=0.001)",
        "schedule": "cosine",
    },
    "localsgd, adam": {"synchronization": "localsgd(3)", "optimizer": "adam(0.01)"},
    "dpsgd": {"architecture": "gossip(ring)"},
    "dpsgd, random times": {"architecture": "gossip(ring)", "compute": "lognormal(0.01)"},
    "choco": {"architecture": "gossip(ring, choco(0.3))", "compression": "topk(0.1)"},
    "d2": {"architecture": "gossip(ring, d2)"},
    "sgp": {"architecture": "gossip(exponential, sgp)"},
    "adpsgd": {"architecture": "gossip(ring, adpsgd)", "synchronization": "asp"},
    "asp": {"architecture": "parameter_server", "synchronization": "asp"},
    "a worker crashes": {
        "architecture": "gossip(ring)",
        "faults": ("crash(2, at=0.1, rejoin=0.15)",),
        "heartbeat": "10ms",
    },
}


def run(**settings: Any) -> Run:
    usual: dict[str, Any] = {"model": "mlp((24,))", "workers": 5, "batch_size": 8, "steps": 8}
    usual |= {"compute": "fixed(0.01)", "eval_every": 4}
    return gradwire.simulate(**{**usual, **settings})


def values(run: Run) -> list[Any]:
    found: list[Any] = [run.ledger.total_bytes]
    for row in run.metrics:
        found += [row["virtual_time_s"], row["virtual_times_s"], row["bytes_sent"]]
    return found


def tensors(run: Run) -> list[Tensor]:
    return [
        tensor
        for replica in run.replicas
        for part in ({"params": replica.params}, replica.optimizer, replica.memory)
        for _, tensor in sorted(part.items())
    ]


@pytest.mark.parametrize("method", METHODS)
def test_runs_are_those_of_one_call_after_another(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = run(**METHODS[method])
    monkeypatch.setattr(VirtualEngine, "_calls_type", Calls)
    alone = run(**METHODS[method])
    assert values(together) == values(alone)
    for one, other in zip(tensors(together), tensors(alone), strict=True):
        assert torch.equal(one, other)


def table() -> CostTable:
    others = {name: Cost(0.5, 0.0, 0.001) for name in ("vector", "pack", "unpack")}
    return CostTable({}, {}, others, {})


class Counting:
    """A function with a batched form, and how many calls came together."""

    def __init__(self, fails: bool = False) -> None:
        self.sizes: list[int] = []

        def square(x: Tensor) -> Tensor:
            self.sizes.append(len(x) if x.dim() > 1 else 1)
            if fails and bool((x == 3).any()):
                raise ValueError("three")
            return x * x

        self.call = batched(Elementwise(square))(square)


def squares(function: Any, coding: Any, starts: list[float]) -> list[Tensor]:
    async def program(node: Node) -> Tensor:
        await node.sleep(starts[node.rank])
        x = torch.full((4,), float(node.rank))
        for _ in range(2):
            x = await node.call(function, x)
        return x

    engine = VirtualEngine(Network.uniform(len(starts)), coding=coding)
    return engine.run([program] * len(starts))


def test_calls_outstanding_together_are_done_together() -> None:
    counting = Counting()
    # The first call of a kind tells how long the others take: about half a second.
    found = squares(counting.call, ModelledCoding(table()), [0.0, 0.0, 0.2, 0.4])
    # Rank 0 makes its second one before the first one of another rank is due.
    assert counting.sizes == [1, 4, 3]
    assert [float(x[0]) for x in found] == [0.0, 1.0, 16.0, 81.0]


def test_calls_apart_are_done_apart() -> None:
    counting = Counting()
    squares(counting.call, ModelledCoding(table()), [0.0, 10.0, 20.0])
    assert counting.sizes == [1] * 6


@pytest.mark.parametrize("coding", [None, MeasuredCoding()])
def test_without_a_table_calls_are_done_one_by_one(coding: Any) -> None:
    counting = Counting()
    squares(counting.call, coding, [0.0, 0.0, 0.0])
    assert counting.sizes == [1] * 6


def test_the_call_that_fails_is_found() -> None:
    counting = Counting(fails=True)
    with pytest.raises(ValueError, match="three") as caught:
        squares(counting.call, ModelledCoding(table()), [0.0, 0.0, 0.0, 0.0])
    assert any("rank 3" in note for note in caught.value.__notes__)


def test_shared_calls_are_done_together_and_once() -> None:
    counting = Counting()
    pair = [torch.full((4,), 2.0), torch.full((4,), 5.0)]

    async def program(node: Node) -> Tensor:
        return await node.share(counting.call, pair[node.rank % 2])

    engine = VirtualEngine(Network.uniform(6), coding=ModelledCoding(table()))
    found = engine.run([program] * 6)
    assert [float(x[0]) for x in found] == [4.0, 25.0] * 3
    assert found[1] is found[3]
    assert found[3] is found[5]
    assert sum(counting.sizes) == 2
