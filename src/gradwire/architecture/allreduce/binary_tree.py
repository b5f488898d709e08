"""All-reduce along a binomial tree: sums go up to rank 0, the mean comes down.

    up:    round j: rank r with lowest bit 2^j sends its sum to r - 2^j
    down:  the same messages backwards

With N bytes, latency a and b seconds per byte it takes 2 log2(n) (a + bN) for powers of two
(Table 6 of the survey). For n = 2^k + e it takes

    2(k a + (k + 1) bN) - min((k - 1 - floor(log2 e)) a, bN)

of which k a + (k + 1) bN are for the way down. On the way up the last branch, of e ranks, is ready
before its turn and may be received in between. (The last term was read off the simulator, not
derived; tests hold it to 34 ranks.) The root sends and receives ceil(log2 n) vectors,
all others less; n - 1 vectors travel in each direction in all.

Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur et al. 2005.

When to use it: for short vectors on many ranks, where links other than those of the tree are bad;
`recursive_doubling` takes half the time if all links are alike.

Messages that are gathered go up and down the tree, too. `all_to_all` stays direct.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.allreduce import _trees
from gradwire.architecture.allreduce._sums import addend, divide_sum
from gradwire.core.group import Group, Merging
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture


@dataclass(frozen=True, repr=False)
class BinaryTree(Architecture):
    """Add up along a binomial tree, then send the mean down."""

    paper = "Rabenseifner 2004, Optimization of collective reduction operations"
    examples = ("binary_tree",)

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        return BinaryTreeGroup(node, label, "gather", members)


class BinaryTreeGroup(Group):
    """Collectives along the branches of a binomial tree; `reduce_tree` is one already."""

    async def all_gather(self, message: Tensor) -> list[Tensor]:
        place = _trees.binomial_position(self.rank, self.size)
        return await _trees.all_gather(self, place, message)

    async def mean(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        return await self.reduce_tree(addend(x, self.size), _Sum(self.size))


@dataclass(frozen=True)
class _Sum(Merging):
    """Adds, and makes the mean of so many addends."""

    count: int

    def merge(self, a: Tensor, b: Tensor, /) -> Tensor:
        return torch.add(a, b)

    def finalize(self, merged: Tensor, /) -> Tensor:
        return divide_sum(merged, self.count)
