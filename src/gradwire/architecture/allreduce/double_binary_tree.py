"""All-reduce along two binary trees at once, each for one half of the vector, in pipelined blocks.

A rank with children in one tree is a leaf of the other, so each rank's NIC carries the traffic of
one inner node and one leaf, and both directions are in use all the time (Sanders, Speck and Träff
2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; NCCL from 2.4 on). The
first tree is numbered in order, its leaves are the even ranks; the second is its mirror image, r
<-> n - 1 - r. With an odd number of ranks the last one stands above both roots.

Up: a rank sends on the sum of block i of its inner tree as soon as both children's are there, and
in the tree in which it is a leaf it is h blocks ahead, where h is the height of its subtree: sums
come up so much later than blocks of leaves. If it sent all of these at once, its sums would queue
behind them. Down: blocks are sent on as they come.

With N bytes, latency a, b seconds per byte, B blocks in each half, c = bN/(2B) the time of a block
and H the height of the trees (floor(log2 n) for even n, one more than for n - 1 for odd n), the
critical path through n > 2 ranks takes

    2(H a + (2B + 2H - 3) c) = 2 H a + (2 + (2H - 3)/B) bN

so with many blocks two vectors' time and a logarithmic latency. Ours, from the NICs of
`runtime/network/network.py`; in the paper every block pays a latency. For 4, 5 and 8 ranks this is
the time exactly if a <= c/2, for 16 ranks if a = 0 (as simulated). For others blocks of the two
trees meet at some NIC in passing, which cost less than 5c wherever we looked (3 to 33 ranks, up to
48 blocks, a <= c/2). With smaller blocks ranks wait for sums before they send more blocks of
leaves, at most a for each block: B should not exceed bN/(4a). Of seven leads that were tried, h is
the one that meets the formula; 2h took one or two c longer for 8 to 32 ranks, but stalled only from
a > 2c on. Two ranks take 2(a + bN/2) if a <= c. No rank sends or receives more than 2N bytes.

When to use it: for long vectors on many ranks, where a ring would pay 2(n-1) latencies.

`blocks` is the number of blocks in each half. By default they have 256 KiB or more and there are
at most 64: that depends on the vector alone, not on the network.

Messages that are gathered and payloads that merge go along the first tree, in one piece.
`all_to_all` stays direct.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.architecture.allreduce import _trees
from gradwire.architecture.allreduce._sums import addend, divide_sum
from gradwire.architecture.allreduce._trees import TreePosition
from gradwire.core.group import Group, Merging, concatenate
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture

_BLOCK_BYTES = 1 << 18
_MOST_BLOCKS = 64


@dataclass(frozen=True, repr=False)
class DoubleBinaryTree(Architecture):
    """Two trees, each for half of the vector; the inner nodes of one are leaves of the other."""

    blocks: int = 0  # in each half; 0: as the size of the vector suggests

    paper = "Sanders et al. 2009, Two-tree algorithms for full bandwidth broadcast and reduction"
    examples = ("double_binary_tree", "double_binary_tree(3)")

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise ValueError(
                f"double_binary_tree: blocks is positive, or 0 to have it chosen, got {self.blocks}"
            )

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        return DoubleBinaryTreeGroup(node, label, "gather", members, self.blocks)


def two_trees(rank: int, size: int) -> tuple[TreePosition, TreePosition]:
    """This rank's place in both."""
    even = size - size % 2
    if rank == even:
        root = _trees.root_of(range(even))
        return _top_position(root, even), _top_position(even - 1 - root, even)
    first = _trees.in_order_position(rank, even)
    second = _mirror_position(_trees.in_order_position(even - 1 - rank, even), even)
    return (
        (first, second) if even == size else (_with_child(first, even), _with_child(second, even))
    )


def _top_position(root: int, rank: int) -> TreePosition:
    """The last rank's, on top of a tree of all others."""
    return TreePosition(None, (root,), (range(rank),))


def _with_child(place: TreePosition, rank: int) -> TreePosition:
    return replace(place, parent=rank) if place.parent is None else place


def _mirror_position(place: TreePosition, size: int) -> TreePosition:
    """Its children are in falling order: what the two trees do is symmetrical."""
    last = size - 1
    return TreePosition(
        None if place.parent is None else last - place.parent,
        tuple(last - child for child in place.children),
        tuple(range(size - below.stop, size - below.start) for below in place.below),
    )


class DoubleBinaryTreeGroup(Group):
    """Collectives along the branches of two trees."""

    def __init__(
        self,
        node: Node,
        label: str,
        route: str,
        members: Sequence[int] | None,
        blocks: int,
    ) -> None:
        super().__init__(node, label, route, members)
        self._blocks = blocks
        if self.size > 1:
            self._first, self._second = two_trees(self.rank, self.size)

    async def mean(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        halves = addend(x, self.size).tensor_split(2)
        num_blocks = self._num_blocks(halves[0])
        blocks = [list(half.tensor_split(num_blocks)) for half in halves]
        trees = list(zip((self._first, self._second), blocks))
        inner = [tree for tree in trees if tree[0].children]
        outer = [tree for tree in trees if not tree[0].children]
        await self._up(inner, outer, num_blocks)
        await self._down(inner, outer, num_blocks)
        return await self.node.share(concatenate, tuple(block for half in blocks for block in half))

    def _num_blocks(self, half: Tensor) -> int:
        size_bytes = half.numel() * half.element_size()
        wanted = self._blocks or min(size_bytes // _BLOCK_BYTES, _MOST_BLOCKS)
        return max(1, min(wanted, half.numel()))

    async def _up(self, inner: "_TreeBlocks", outer: "_TreeBlocks", num_blocks: int) -> None:
        """Sums of blocks to the root, which divides them."""
        node, tag = self.node, self._tag()
        ahead = max(_height(place) for place, _ in inner)
        for number in range(-ahead, num_blocks):
            if number + ahead < num_blocks:
                for place, blocks in outer:
                    assert place.parent is not None
                    await self.send(place.parent, tag, blocks[number + ahead])
            if number < 0:
                continue
            for place, blocks in inner:
                for child in place.children:
                    other = await self.recv(child, tag)
                    pair = (blocks[number], other) if child > self.rank else (other, blocks[number])
                    blocks[number] = await node.call(torch.add, *pair)
                if place.parent is not None:
                    await self.send(place.parent, tag, blocks[number])
                else:
                    blocks[number] = await node.call(divide_sum, blocks[number], self.size)

    async def _down(self, inner: "_TreeBlocks", outer: "_TreeBlocks", num_blocks: int) -> None:
        """Sends finished blocks to all ranks."""
        tag = self._tag()
        for number in range(num_blocks):
            for place, blocks in inner:
                if place.parent is not None:
                    blocks[number] = await self.recv(place.parent, tag)
                for child in reversed(place.children):
                    await self.send(child, tag, blocks[number])
        for place, blocks in outer:
            assert place.parent is not None
            for number in range(num_blocks):
                blocks[number] = await self.recv(place.parent, tag)

    async def all_gather(self, message: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [message]
        return await _trees.all_gather(self, self._first, message)

    async def reduce_tree(self, x: Tensor, merging: Merging) -> Tensor:
        if self.size == 1:
            return await self.node.call(merging.finalize, x)
        x = await _trees.reduce(self, self._first, x, merging.merge)
        if self._first.parent is None:
            x = await self.node.call(merging.finalize, x)
        return await _trees.broadcast(self, self._first, x)


_TreeBlocks = list[tuple[TreePosition, list[Tensor]]]


def _height(place: TreePosition) -> int:
    """Of the subtree below: its left part is full."""
    return max(len(below).bit_length() for below in place.below)
