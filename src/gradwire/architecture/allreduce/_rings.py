"""Collectives on a ring, in which every member sends only to its right neighbour."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from gradwire.core.exchange import Addends, Passed, Whole, as_argument
from gradwire.core.group import FEWEST, Group, concatenate
from gradwire.core.node import Pass, Tag

T = TypeVar("T")


async def all_reduce(
    group: Group, x: Tensor, finish: Callable[[Tensor], Awaitable[Tensor]]
) -> Tensor:
    """Sums chunks of x around the ring; their last adder finishes each; they go around again."""
    if group.size == 1:
        return await finish(x)
    mine = await finish(await _sum_of_chunk(group, x))
    await group._pass_gate()
    chunks = await gather(group, mine, (group.rank + 1) % group.size)
    return await group.node.share(concatenate, as_argument(chunks))


async def _sum_of_chunk(group: Group, x: Tensor) -> Tensor:
    """Rank r gets the sum of all chunks r + 1."""
    node, tag = group.node, group._tag()
    if x.numel():
        own = Addends(x, group.size, group.rank)
        total = await _as_one_effect(group, tag, group.rank, own)
        if total is not None:
            return total
    right, left = _neighbours(group)
    chunks = list(x.tensor_split(group.size))
    for turn in range(group.size - 1):
        leaving, coming = (group.rank - turn) % group.size, (group.rank - turn - 1) % group.size
        await group.send(right, tag, chunks[leaving])
        partial = await group.recv(left, tag)
        chunks[coming] = await node.call(torch.add, partial, chunks[coming])
    return chunks[right]


async def gather(group: Group, message: Tensor, first: int) -> Sequence[Tensor]:
    """Everyone's message, of which this member holds number `first`, in n-1 steps."""
    tag = group._tag()
    gathered = await _as_one_effect(group, tag, first, Whole(message, first))
    if gathered is not None:
        return gathered
    bundles = [[message] for _ in range(group.size)]
    await pass_around(group, bundles, first, tag)
    return [message for [message] in bundles]


async def pass_around(
    group: Group, bundles: list[list[Tensor]], first: int, tag: Tag | None = None
) -> None:
    """Fills `bundles`, of which this member holds number `first`, in n-1 steps.

    All know how many messages are in each.
    """
    tag = group._tag() if tag is None else tag
    right, left = _neighbours(group)
    for turn in range(group.size - 1):
        leaving, coming = (first - turn) % group.size, (first - turn - 1) % group.size
        for message in bundles[leaving]:
            await group.send(right, tag, message)
        bundles[coming] = [await group.recv(left, tag) for _ in bundles[coming]]


async def _as_one_effect(group: Group, tag: Tag, first: int, outgoing: Passed[T]) -> T | None:
    """If the engine has it for so many members."""
    if group.size < FEWEST:
        return None
    return await Pass(group.members, group.rank, tag, first, outgoing, group.label)


async def merge_to_last(
    group: Group, x: Tensor, merge: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Merges from member 0 on; the last one gets the result."""
    tag = group._tag()
    if group.rank > 0:
        x = await group.node.call(merge, await group.recv(group.rank - 1, tag), x)
    if group.rank < group.size - 1:
        await group.send(group.rank + 1, tag, x)
    return x


async def pass_from_last(group: Group, x: Tensor) -> Tensor:
    """What the last member holds, sent around the ring."""
    tag, last = group._tag(), group.size - 1
    right, left = _neighbours(group)
    if group.rank != last:
        x = await group.recv(left, tag)
    if right != last:
        await group.send(right, tag, x)
    return x


def _neighbours(group: Group) -> tuple[int, int]:
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size
