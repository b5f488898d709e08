"""All-reduce in two levels: within groups of near workers, then between the groups' leaders.

    within each group:   sums go up a binomial tree to the group's first rank, the leader
    between leaders:     a ring all-reduce
    within each group:   the mean comes down the tree

Groups are ranges of ranks whose sizes differ by at most one. With g groups of m = n/g ranks, N
bytes, latency a and b seconds per byte it takes

    2 log2(m) (a + bN) + 2(g-1)(a + bN/g)

for m a power of two; for other m the two ways along the tree take what `binary_tree` says of m
ranks. These three phases are those of Jia et al. 2018, "Highly scalable deep learning training
system with mixed-precision", and Goyal et al. 2017, "Accurate, large minibatch SGD". The leaders
form a ring because links between groups are the scarce ones, and nothing sends fewer bytes through
them; its latency grows with the groups, which are few, not with the workers.

When to use it: where workers of a group are better connected than groups are (machines with
several GPUs). On a uniform network it only saves latencies of a long ring.

With fewer workers than groups each is a group of its own: then this is the ring.

Messages that are gathered and payloads that merge go the same way, except that what leaders merge
goes along a binomial tree between them. `all_to_all` stays direct.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.architecture.allreduce import _rings, _trees
from gradwire.architecture.allreduce._sums import addend, divide_sum
from gradwire.core.group import Group, Merging
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture


@dataclass(frozen=True, repr=False)
class Hierarchical(Architecture):
    """Add up in each group, all-reduce between the groups' leaders, send the mean down."""

    groups: int

    paper = "Jia et al. 2018, Highly scalable deep learning training system with mixed-precision"
    examples = ("hierarchical(2)", "hierarchical(3)")

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"hierarchical: at least one group, got groups={self.groups}")

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        return HierarchicalGroup(node, label, "gather", members, self.groups)


class HierarchicalGroup(Group):
    """Collectives through the leader of each group."""

    def __init__(
        self,
        node: Node,
        label: str,
        route: str,
        members: Sequence[int] | None,
        num_groups: int,
    ) -> None:
        super().__init__(node, label, route, members)
        # Two ranks are in one group or leaders of two: messages of both kinds never mix.
        self._groups = _cut_into_ranges(self.size, min(num_groups, self.size))
        mine = next(ranks for ranks in self._groups if self.rank in ranks)
        self._near = Group(node, label, route, [self.members[rank] for rank in mine])
        self._place = _trees.binomial_position(self._near.rank, self._near.size)
        self._leaders: Group | None = None  # if this rank is one
        if self._place.parent is None:
            leaders = [self.members[ranks.start] for ranks in self._groups]
            self._leaders = Group(node, label, route, leaders)

    async def mean(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        x = addend(x, self.size)
        x = await _trees.reduce(self._near, self._place, x, torch.add)
        if self._leaders is not None:
            x = await _rings.all_reduce(self._leaders, x, self._finish_chunk)
        return await _trees.broadcast(self._near, self._place, x)

    async def _finish_chunk(self, chunk: Tensor) -> Tensor:
        return await self.node.call(divide_sum, chunk, self.size)

    async def all_gather(self, message: Tensor) -> Sequence[Tensor]:
        near = await _trees.gather(self._near, self._place, message)
        start = self.rank - self._near.rank
        held = {start + rank: near[rank] for rank in near}
        if self._leaders is not None:
            if len(self._groups) == self.size:
                return await _rings.gather(self._leaders, message, self._leaders.rank)
            bundles = [[message] * len(ranks) for ranks in self._groups]
            bundles[self._leaders.rank] = [held[rank] for rank in sorted(held)]
            await _rings.pass_around(self._leaders, bundles, self._leaders.rank)
            held = dict(enumerate(message for bundle in bundles for message in bundle))
        return await _trees.spread_down(self._near, self._place, held, range(self.size), start)

    async def reduce_tree(self, x: Tensor, merging: Merging) -> Tensor:
        x = await _trees.reduce(self._near, self._place, x, merging.merge)
        if self._leaders is not None:
            x = await self._leaders.reduce_tree(x, merging)
        return await _trees.broadcast(self._near, self._place, x)


def _cut_into_ranges(size: int, parts: int) -> list[range]:
    """Ranges of `size` ranks, the longer ones first."""
    length, longer = divmod(size, parts)
    starts = [part * length + min(part, longer) for part in range(parts + 1)]
    return [range(*pair) for pair in pairwise(starts)]
