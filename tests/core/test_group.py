"""Collectives of every architecture of workers only, on one to seventeen virtual nodes.

How many bytes and seconds they take is in the test of each: tests/architecture.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gradwire.architecture import ARCHITECTURE
from gradwire.core.group import Group, mean_in_order
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.notation import notation_name
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from sampling import sizes

EXAMPLES = [
    ARCHITECTURE.parse(text)
    for cls in ARCHITECTURE
    for text in (cls.examples or (notation_name(cls),))
]
ARCHITECTURES = [a for a in EXAMPLES if "mean" in a.offers and a.num_others == 0]
every = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=repr)
all_sizes = pytest.mark.parametrize("size", sizes(range(1, 18)))
few_sizes = pytest.mark.parametrize("size", [1, 2, 3, 5, 8])


def run(architecture, size: int, collective) -> tuple[list, VirtualEngine]:
    """`collective(group)` on every rank."""

    async def program(node: Node):
        return await collective(architecture.group(node, "x"))

    engine = VirtualEngine(Network.uniform(size))
    return engine.run([program] * size), engine


@dataclass(frozen=True)
class Merged:
    """One way to merge, that all messages come to."""

    merge: Callable[[Tensor, Tensor], Tensor] = lambda a, b: torch.cat([a, b])

    def finalize(self, merged: Tensor) -> Tensor:
        return merged


def vector(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return Key(8).private(rank).normal(numel).to(dtype)


@every
@few_sizes
def test_all_to_all_transposes(architecture, size) -> None:
    async def collective(group: Group) -> list[int]:
        messages = [torch.tensor([10 * group.rank + peer]) for peer in range(size)]
        return [int(message) for message in await group.all_to_all(messages)]

    results, _ = run(architecture, size, collective)
    assert results == [[10 * peer + rank for peer in range(size)] for rank in range(size)]


@every
@all_sizes
def test_all_gather_takes_messages_of_any_length(architecture, size) -> None:
    async def collective(group: Group) -> list[list[int]]:
        mine = torch.full((group.rank * 3 % 5,), group.rank)  # one of them is empty
        return [message.tolist() for message in await group.all_gather(mine)]

    results, _ = run(architecture, size, collective)
    expected = [[rank] * (rank * 3 % 5) for rank in range(size)]
    assert results == [expected] * size


@every
@all_sizes
def test_the_mean_is_right_and_every_rank_holds_the_same_bits(architecture, size) -> None:
    for numel in (0, 1, 5, 36, 100):
        inputs = [vector(rank, numel, torch.float64) for rank in range(size)]
        before = [x.clone() for x in inputs]

        async def collective(group: Group, inputs: list[Tensor] = inputs) -> Tensor:
            return await group.mean(inputs[group.rank])

        results, _ = run(architecture, size, collective)
        expected = torch.stack(inputs).mean(dim=0)
        for result in results:
            assert torch.allclose(result, expected, rtol=1e-14, atol=1e-14)
            assert torch.equal(result, results[0])
        assert all(torch.equal(x, b) for x, b in zip(inputs, before)), "an input was changed"


@every
def test_some_of_the_workers_average_among_themselves(architecture) -> None:
    teams = ((6, 1, 4), (0, 2, 3, 5))

    async def program(node: Node) -> list:
        team = next(team for team in teams if node.rank in team)
        group = architecture.group(node, "x", team)
        mean = await group.mean(torch.full((9,), float(node.rank)))
        gathered = await group.all_gather(torch.tensor([node.rank]))
        merged = await group.reduce_tree(torch.tensor([node.rank]), Merged())
        return [float(mean[-1]), [int(m) for m in gathered], merged.tolist()]

    results = VirtualEngine(Network.uniform(7)).run([program] * 7)
    for rank, result in enumerate(results):
        team = next(team for team in teams if rank in team)
        assert result == [pytest.approx(sum(team) / len(team)), list(team), list(team)]


@every
@few_sizes
def test_every_byte_is_in_the_ledger_under_the_label(architecture, size) -> None:
    async def collective(group: Group) -> Tensor:
        await group.reduce_tree(vector(group.rank, 3), Merged(torch.add))
        await group.all_gather(vector(group.rank, 5))
        return await group.mean(vector(group.rank, 40))

    _, engine = run(architecture, size, collective)
    assert set(engine.ledger.tensor_bytes) == ({"x"} if size > 1 else set())


@every
@all_sizes
def test_a_tree_merges_in_rank_order(architecture, size) -> None:
    calls = []

    def join(a: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return torch.cat([a, b])

    async def collective(group: Group) -> list[int]:
        return (await group.reduce_tree(torch.tensor([group.rank]), Merged(join))).tolist()

    results, engine = run(architecture, size, collective)
    assert results == [list(range(size))] * size
    assert len(calls) == size - 1
    assert engine.ledger.total_messages == 2 * (size - 1)


@every
@few_sizes
def test_collectives_in_a_row_do_not_mix_their_messages(architecture, size) -> None:
    async def collective(group: Group) -> list[float]:
        one = torch.ones(7)
        first = await group.mean(one * group.rank)
        second = await group.mean(one * 10)
        gathered = await group.all_gather(torch.tensor([float(group.rank)]))
        tree = await group.reduce_tree(one, Merged(torch.add))
        third = await group.mean(one * 100)
        return [float(v[0]) for v in (first, second, gathered[-1], tree, third)]

    results, _ = run(architecture, size, collective)
    ranks = pytest.approx((size - 1) / 2, abs=1e-6)
    assert results == [[ranks, 10.0, size - 1.0, float(size), 100.0]] * size


@every
@few_sizes
def test_a_fast_rank_may_start_the_next_exchange_of_the_same_tensor(architecture, size) -> None:
    async def program(node: Node) -> list[float]:
        out = []
        for step in range(4):
            await node.sleep(0.01 * ((node.rank + step) % 3))  # out of step
            group = architecture.group(node, "x")  # its rounds count from one again
            out.append(float((await group.mean(torch.full((5,), 10.0**step)))[0]))
        return out

    engine = VirtualEngine(Network.uniform(size))
    expected = pytest.approx([10.0**step for step in range(4)])
    assert engine.run([program] * size) == [expected] * size


@every
@few_sizes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_close_to_the_true_mean(architecture, size, dtype) -> None:
    async def collective(group: Group) -> Tensor:
        return await group.mean(vector(group.rank, 50, dtype))

    results, _ = run(architecture, size, collective)
    inputs = torch.stack([vector(rank, 50, dtype).double() for rank in range(size)])
    assert results[0].dtype == dtype
    # A division and size - 1 additions round, each at most by eps / 2 of mean |x|.
    bound = size * torch.finfo(dtype).eps / 2 * inputs.abs().mean(dim=0)
    assert ((results[0].double() - inputs.mean(dim=0)).abs() <= bound).all()


@every
@pytest.mark.parametrize("size", [2, 3, 8, 17])
def test_partial_sums_of_half_precision_do_not_overflow(architecture, size) -> None:
    async def collective(group: Group) -> Tensor:
        return await group.mean(torch.full((20,), 60000.0, dtype=torch.float16))

    results, _ = run(architecture, size, collective)
    for result in results:
        assert torch.equal(result, results[0])
        assert ((result.double() / 60000 - 1).abs() <= size * 2.0**-11).all()


@pytest.mark.parametrize("size", sizes(range(1, 10)))
def test_means_in_rank_order_round_half_precision_once(size) -> None:
    pieces = [torch.tensor([1.0], dtype=torch.float16)]
    pieces += [torch.tensor([2.0**-11], dtype=torch.float16)] * size
    # Each small one alone would be lost next to the 1.
    mean = mean_in_order(iter(pieces), 2)
    expected = torch.tensor([(1 + size * 2.0**-11) / 2], dtype=torch.float64).to(torch.float16)
    assert mean.dtype == torch.float16
    assert torch.equal(mean, expected)
    assert float(pieces[0]) == 1.0
