"""Collectives on trees: each rank's position, and messages along the branches.

Below every branch is a range of ranks without gaps, so what is merged on the way up stays in the
order of the ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.core.group import Group


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Of one rank in a tree."""

    parent: int | None  # None: the root
    children: tuple[int, ...]  # in the order of the ranks
    below: tuple[range, ...]  # the ranks of each child's subtree, itself among them


def binomial_position(rank: int, size: int) -> TreePosition:
    """In the tree whose root is rank 0 and in which r hangs below r without its lowest bit."""
    children: list[int] = []
    below: list[range] = []
    span = 1
    while span < size and rank % (2 * span) == 0:
        if rank + span < size:
            children.append(rank + span)
            below.append(range(rank + span, min(rank + 2 * span, size)))
        span *= 2
    return TreePosition(rank - span if rank else None, tuple(children), tuple(below))


def in_order_position(rank: int, size: int) -> TreePosition:
    """In the binary tree whose left subtrees are full and that is numbered from left to right.

    Its leaves are the even ranks. No branch is longer than log2(size).
    """
    parent, ranks = None, range(size)
    while (root := root_of(ranks)) != rank:
        parent = root
        ranks = range(ranks.start, root) if rank < root else range(root + 1, ranks.stop)
    below = tuple(filter(len, (range(ranks.start, rank), range(rank + 1, ranks.stop))))
    return TreePosition(parent, tuple(map(root_of, below)), below)


def root_of(ranks: range) -> int:
    """Of the tree numbered in order: its left subtree is the largest full one that there is."""
    return ranks.start + (1 << (len(ranks).bit_length() - 1)) - 1


async def reduce(
    group: Group, place: TreePosition, x: Tensor, merge: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Merges what is below, in the order of the ranks, and sends it up; the root gets all."""
    node, tag = group.node, group._tag()
    for child in place.children:
        other = await group.recv(child, tag)
        x = await node.call(merge, *((x, other) if child > group.rank else (other, x)))
    if place.parent is not None:
        await group.send(place.parent, tag, x)
    return x


async def broadcast(group: Group, place: TreePosition, x: Tensor) -> Tensor:
    """What the root holds, sent down."""
    tag = group._tag()
    if place.parent is not None:
        x = await group.recv(place.parent, tag)
    for child in reversed(place.children):  # the deepest first
        await group.send(child, tag, x)
    return x


async def gather(group: Group, place: TreePosition, message: Tensor) -> dict[int, Tensor]:
    """The messages of all ranks below, this one's among them, on every rank."""
    tag = group._tag()
    held = {group.rank: message}
    for child, below in zip(place.children, place.below):
        for rank in below:
            held[rank] = await group.recv(child, tag)
    if place.parent is not None:
        for rank in sorted(held):
            await group.send(place.parent, tag, held[rank])
    return held


async def spread_down(
    group: Group, place: TreePosition, held: dict[int, Tensor], names: Sequence[int], start: int = 0
) -> list[Tensor]:
    """The messages of these names, which the root holds; `gather` left every rank some of them.

    That of member number r is named start + r.
    """
    tag = group._tag()
    if place.parent is not None:
        missing = [name for name in names if name not in held]
        held = held | {name: await group.recv(place.parent, tag) for name in missing}
    for child, below in zip(reversed(place.children), reversed(place.below)):
        for name in names:
            if name - start not in below:
                await group.send(child, tag, held[name])
    return [held[name] for name in names]


async def all_gather(group: Group, place: TreePosition, message: Tensor) -> list[Tensor]:
    """Up to the root and down again."""
    held = await gather(group, place, message)
    return await spread_down(group, place, held, range(group.size))
