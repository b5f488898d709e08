"""Passes as one effect: the results, virtual times, bytes and order of messages one by one."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.architecture.allreduce.ring import RingGroup
from gradwire.core.errors import DeadlockError
from gradwire.core.exchange import Addends, Whole, span, sum_around
from gradwire.core.group import FEWEST, Group
from gradwire.core.node import Node
from gradwire.experiment.costs.coding_costs import read_costs
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.coding_time import ModelledCoding
from gradwire.runtime.virtual.engine import VirtualEngine

SIZE = 7
ALIKE = Network((1e-3,) * SIZE, (1e6,) * SIZE)
METHODS: dict[str, dict[str, Any]] = {
    "mean": {},
    "more workers than elements of a tensor": {"scheduling": "wfbp", "workers": 12},
    "means of 16 bits": {"compression": "fp16"},
    "gathered": {"compression": "ef(topk(0.05))"},
    "payloads of different sizes": {"compression": "ef(threshold(0.001))"},
    "sums of payloads": {"compression": "ef(powersgd(1))"},
    "merged": {"compression": "gtopk(0.05)"},
    "overlapped": {"scheduling": "wfbp", "compression": "qsgd(bits=4)"},
    "long messages overlap": {"scheduling": "fusion(4000)", "bandwidth": "1Mbit"},
    "first layers first": {"scheduling": "priority(4000)"},  # with priorities: messages
    "sums beside other codecs": {
        "scheduling": "wfbp",
        "compression": 'partition({"weight": "topk(0.01)", "*": "fp16"})',
    },
    "local steps": {"synchronization": "localsgd(2)"},
    "some workers": {"synchronization": "fedavg(0.7)"},
    "other networks": {"what_if": ("1Mbit", "10Gbit"), "scheduling": "wfbp"},
    "gathered on other networks": {"what_if": ("1Mbit",), "compression": "ef(topk(0.05))"},
    "a torus": {"architecture": "torus2d", "workers": 20},
    "one column": {"architecture": "torus2d(cols=1)", "compression": "ef(topk(0.05))"},
    "in groups": {"architecture": "hierarchical(4)", "workers": 8, "compression": "fp16"},
    "groups of one": {"architecture": "hierarchical(5)", "compression": "ef(topk(0.05))"},
    "different links": {"bandwidth": "1Mbit,1Mbit,1Mbit,10Mbit,10Mbit"},
    "random times": {"compute": "lognormal(0.01)"},
    "no coding costs": {"coding": "free", "latency": "0us"},
    "measured coding": {"coding": "measured"},  # messages
    "token buckets": {"burst": 2000},  # messages
    "lost messages": {"faults": ("loss(0.05)",)},  # messages
}

needs_library = pytest.mark.skipif(
    kernels.cpu_backend() != "native", reason="passes are one effect in the C library only"
)


def run(**settings: Any) -> Any:
    usual: dict[str, Any] = {"model": "mlp((24,))", "workers": 5, "batch_size": 8, "steps": 6}
    usual |= {"compute": "fixed(0.01)", "eval_every": 3, "bandwidth": "100Mbit"}
    return gradwire.simulate(**{**usual, "architecture": "ring", **settings})


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
        rows = [] if method == "measured coding" else rows  # takes other times in every run
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


def make_coding(seed: int) -> ModelledCoding | None:
    """Calls that take as long as messages, no time, or none at all."""
    slowdown = (None, 0.0, 1.0, 100.0)[seed % 4]
    return None if slowdown is None else ModelledCoding(read_costs("").table, slowdown)


def play(seed: int, knows_exchanges: bool) -> tuple[Any, ...]:
    """Programs that sum and gather in several groups at once, among other messages and calls."""
    log: list[tuple[Any, ...]] = []
    common = random.Random(seed)
    groups = [sorted(common.sample(range(SIZE), common.randint(FEWEST, SIZE))) for _ in range(3)]
    for group in groups:
        common.shuffle(group)
    rounds = [[common.choice("mmgdcs") for _ in range(4)] for _ in groups]
    lengths = [[common.randint(0, 5000) for _ in row] for row in rounds]
    lengths[0][0] = 3  # some parts are empty

    async def exchange(node: Node, number: int) -> None:
        own = random.Random(f"{seed} {number} {node.rank}")
        members = groups[number]
        ring = RingGroup(node, f"group {number}", "gather", members)
        ring.rank = members.index(node.rank)
        direct = Group(node, f"direct {number}", members=members)
        for kind, length in zip(rounds[number], lengths[number]):
            await node.sleep(own.choice([0.0, 0.0, 0.001, 0.02]))
            x = torch.arange(length, dtype=torch.float32) * (node.rank + 1) / 7
            if kind == "m":
                result: Any = await ring.mean(x)
            elif kind == "g":
                result = await ring.all_gather(x[: length // (node.rank + 1)])
            elif kind == "d":
                result = await direct.all_gather(x[: length // (node.rank + 1)])
            elif kind == "c":
                result = await node.call(torch.mul, x, 2.0)
            else:  # to a neighbour, on the same links
                await ring.send((ring.rank + 1) % ring.size, ("next", number), x)
                result = await ring.recv((ring.rank - 1) % ring.size, ("next", number))
            if not isinstance(result, Tensor):
                result = torch.cat([part.reshape(-1) for part in result])
            log.append((await node.now(), node.rank, number, kind, result.tolist()))

    async def program(node: Node) -> None:
        own = [number for number, members in enumerate(groups) if node.rank in members]
        for child in [await node.spawn(exchange(node, number)) for number in own]:
            await node.join(child)

    VirtualEngine._knows_exchanges = knows_exchanges
    engine = VirtualEngine(make_network(seed), coding=make_coding(seed))
    for _ in range(2):  # clocks and NICs are kept from one run to the next
        engine.run([program] * SIZE)
    nics = engine.nics
    state = [list(nics.egress_free), list(nics.ingress_free), list(nics.delivered)]
    busy = [engine.coding_free_s(rank) for rank in range(SIZE)]
    return log, engine.clocks, state, busy, engine.ledger.snapshot()


@needs_library
@pytest.mark.parametrize("seed", range(60))
def test_events_are_those_of_messages_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VirtualEngine, "_knows_exchanges", True)  # put back at the end
    together, alone = play(seed, True), play(seed, False)
    assert together == alone


@needs_library
def test_a_pass_takes_one_effect_of_each_member() -> None:
    async def program(node: Node) -> None:
        await RingGroup(node, "x", "gather", None).all_gather(torch.ones(3))

    engine = VirtualEngine(ALIKE)
    engine.run([program] * SIZE)
    assert engine.num_effects == SIZE
    assert engine.ledger.total_messages == SIZE * (SIZE - 1)
    assert engine.ledger.total_bytes == SIZE * (SIZE - 1) * 12
    assert engine.ledger.tensor_bytes == {"x": SIZE * (SIZE - 1) * 12}


@needs_library
def test_a_member_that_does_not_take_part_is_a_deadlock() -> None:
    async def program(node: Node) -> None:
        if node.rank:
            await RingGroup(node, "x", "gather", None).all_gather(torch.ones(1))

    async def again(node: Node) -> list[float]:
        gathered = await RingGroup(node, "x", "gather", None).all_gather(torch.ones(1))
        return torch.cat(list(gathered)).tolist()

    engine = VirtualEngine(ALIKE)
    with pytest.raises(DeadlockError, match=r"messages around a ring of 7 members, tag \('x', 1\)"):
        engine.run([program] * SIZE)
    # Member 1 could only send its own; the last one, those of members 1 to 6.
    assert [row[(rank + 1) % SIZE] for rank, row in enumerate(engine.ledger.messages_to)] == [
        *(0, 1, 2, 3, 4, 5, 6)
    ]
    assert engine.ledger.tensor_bytes == {"x": 21 * 4}
    assert engine.run([again] * SIZE) == [[1.0] * SIZE] * SIZE


@needs_library
def test_vectors_of_different_lengths_are_refused() -> None:
    async def program(node: Node) -> None:
        await RingGroup(node, "x", "gather", None).mean(torch.ones(14 + node.rank % 2))

    with pytest.raises(ValueError, match="add up different vectors"):
        VirtualEngine(ALIKE).run([program] * SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 5, 7, 50])
def test_sums_are_added_in_the_order_of_the_ring(dtype: torch.dtype, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    wholes = [torch.randn(numel, generator=generator).to(dtype) for _ in range(SIZE)]
    wholes[3][0] = -0.0
    chunks = [whole.tensor_split(SIZE) for whole in wholes]
    expected = []
    for number in range(SIZE):
        total = chunks[number][number]
        for turn in range(1, SIZE):
            total = torch.add(total, chunks[(number + turn) % SIZE][number])
        expected.append(total)
    assert torch.equal(sum_around(wholes), torch.cat(expected))
    everyone = [Addends(whole, SIZE, rank) for rank, whole in enumerate(wholes)]
    for rank, own in enumerate(everyone):
        assert torch.equal(own.message, chunks[rank][rank])
        assert own.nbytes == own.message.numel() * own.message.element_size()
        start, stop = span(numel, SIZE, (rank + 1) % SIZE)
        assert torch.equal(own.received(everyone, rank), torch.cat(expected)[start:stop])


def test_members_get_the_same_gathered_messages() -> None:
    everyone = [Whole(torch.tensor([float(rank)]), (rank + 1) % SIZE) for rank in range(SIZE)]
    gathered = everyone[2].received(everyone, 2)
    assert [int(message) for message in gathered] == [6, 0, 1, 2, 3, 4, 5]
    assert everyone[5].received(everyone, 5) is gathered
