"""Exchanges as one effect: the results, virtual times, bytes and order of messages one by one."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.core.errors import DeadlockError
from gradwire.core.exchange import Column, Shards, ToAll, span
from gradwire.core.group import FEWEST, Group
from gradwire.core.node import Node
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

SIZE = 7
ALIKE = Network((1e-3,) * SIZE, (1e6,) * SIZE)
METHODS: dict[str, dict[str, Any]] = {
    "mean": {},
    "means of 16 bits": {"compression": "fp16"},
    "other networks": {"what_if": ("1Mbit", "10Gbit")},
    "gathered": {"compression": "ef(topk(0.05))"},
    "scattered": {"compression": "ef(sign)", "model": "mlp((1024,))", "steps": 3},
    "merged": {"compression": "gtopk(0.05)"},
    "overlapped": {"scheduling": "wfbp", "compression": "qsgd(bits=4)"},
    "first layers first": {"scheduling": "priority(4000)"},  # with priorities: messages
    "some workers": {"synchronization": "fedavg(0.7)"},
    "in groups": {"architecture": "hierarchical(4)", "workers": 8},
    "different links": {"bandwidth": "1Mbit,1Mbit,1Mbit,10Mbit,10Mbit"},
    "random times": {"compute": "lognormal(0.01)"},
    "token buckets": {"burst": 2000},  # messages
    "lost messages": {"faults": ("loss(0.05)",)},  # messages
}

needs_library = pytest.mark.skipif(
    kernels.cpu_backend() != "native", reason="exchanges are one effect in the C library only"
)


def run(**settings: Any) -> Any:
    usual: dict[str, Any] = {"model": "mlp((24,))", "workers": 5, "batch_size": 8, "steps": 6}
    usual |= {"compute": "fixed(0.01)", "eval_every": 3, "bandwidth": "100Mbit"}
    return gradwire.simulate(**{**usual, **settings})


@needs_library
@pytest.mark.parametrize("method", METHODS)
def test_runs_are_those_of_messages_one_by_one(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for knows in (True, False):
        monkeypatch.setattr(VirtualEngine, "_knows_exchanges", knows)
        own = run(**METHODS[method])
        rows = [(r["virtual_time_s"], r["virtual_times_s"], r["bytes_sent"]) for r in own.metrics]
        found.append((own.params.tolist(), rows, own.ledger.snapshot()))
    assert found[0] == found[1]


def make_network(seed: int) -> Network:
    """Links of different rates and latencies; in some networks all are alike, so that many events
    come at the same time."""
    draw = random.Random(seed)
    if seed % 3 == 0:
        return ALIKE
    return Network(
        tuple(draw.choice([0.0, 1e-3, 2.5e-3]) for _ in range(SIZE)),
        tuple(draw.choice([1e5, 1e6, 3e6]) for _ in range(SIZE)),
    )


def play(seed: int, knows_exchanges: bool) -> tuple[Any, ...]:
    """Programs that exchange in several groups at once, among other messages and pauses."""
    log: list[tuple[Any, ...]] = []
    common = random.Random(seed)
    groups = [sorted(common.sample(range(SIZE), common.randint(FEWEST, SIZE))) for _ in range(3)]
    rounds = [[common.choice("mgts") for _ in range(4)] for _ in groups]
    lengths = [[common.randint(0, 5000) for _ in row] for row in rounds]

    async def exchange(node: Node, number: int) -> None:
        own = random.Random(f"{seed} {number} {node.rank}")
        group = Group(node, f"group {number}", members=groups[number])
        for kind, length in zip(rounds[number], lengths[number]):
            await node.sleep(own.choice([0.0, 0.0, 0.001, 0.02]))
            x = torch.arange(length, dtype=torch.float32) * (node.rank + 1)
            if kind == "m":
                result: Any = await group.mean(x)
            elif kind == "g":
                result = await group.all_gather(x[: length // (node.rank + 1)])
            elif kind == "t":
                pieces = [x[: own.randint(0, length)] for _ in range(group.size)]
                result = await group.all_to_all(pieces)
            else:  # to a neighbour, on the same links
                await group.send((group.rank + 1) % group.size, ("next", number), x)
                result = await group.recv((group.rank - 1) % group.size, ("next", number))
            if not isinstance(result, Tensor):
                result = torch.cat([part.reshape(-1) for part in result])
            log.append((await node.now(), node.rank, number, kind, result.double().sum().item()))

    async def program(node: Node) -> None:
        own = [number for number, members in enumerate(groups) if node.rank in members]
        for child in [await node.spawn(exchange(node, number)) for number in own]:
            await node.join(child)

    VirtualEngine._knows_exchanges = knows_exchanges
    engine = VirtualEngine(make_network(seed))
    for _ in range(2):  # clocks and NICs are kept from one run to the next
        engine.run([program] * SIZE)
    nics = engine.nics
    state = [list(nics.egress_free), list(nics.ingress_free), list(nics.delivered)]
    return log, engine.clocks, state, engine.ledger.snapshot()


@needs_library
@pytest.mark.parametrize("seed", range(30))
def test_events_are_those_of_messages_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VirtualEngine, "_knows_exchanges", True)  # put back at the end
    together, alone = play(seed, True), play(seed, False)
    assert together == alone


@needs_library
def test_exchanges_take_one_effect_of_each_member() -> None:
    async def program(node: Node) -> None:
        await Group(node, "x").all_gather(torch.ones(3))

    engine = VirtualEngine(ALIKE)
    engine.run([program] * SIZE)
    assert engine.num_effects == SIZE
    assert engine.ledger.total_messages == SIZE * (SIZE - 1)
    assert engine.ledger.total_bytes == SIZE * (SIZE - 1) * 12


@needs_library
def test_a_member_that_does_not_take_part_is_a_deadlock() -> None:
    async def program(node: Node) -> None:
        if node.rank:
            await Group(node, "x").all_gather(torch.ones(3))

    engine = VirtualEngine(ALIKE)
    with pytest.raises(DeadlockError, match=r"messages from 6 members of a group, tag \('x', 1\)"):
        engine.run([program] * SIZE)
    engine.run([lambda node: Group(node, "y").all_gather(torch.ones(1))] * SIZE)  # type: ignore[list-item]


def test_shards_are_those_of_tensor_split() -> None:
    x = torch.arange(23.0)
    for size in (1, 4, 7, 30):
        pieces = x.tensor_split(size)
        own = Shards(x, size)
        assert [piece.nbytes for piece in pieces] == list(own.nbytes)
        assert [span(23, size, i) for i in range(size)] == [
            (int(sum(map(len, pieces[:i]))), int(sum(map(len, pieces[: i + 1]))))
            for i in range(size)
        ]


def test_members_receive_columns() -> None:
    everyone = [Shards(torch.arange(10.0) + 100 * rank, 4) for rank in range(4)]
    received = everyone[2].received(everyone, 2)
    assert isinstance(received, Column)
    assert [piece.tolist() for piece in received] == [[6 + 100 * r, 7 + 100 * r] for r in range(4)]
    gathered = [ToAll(torch.tensor([float(rank)])) for rank in range(4)]
    assert gathered[1].received(gathered, 1) is gathered[3].received(gathered, 3)
