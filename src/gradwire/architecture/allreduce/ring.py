"""Ring all-reduce (Patarasuk and Yuan 2009): 2(n-1) steps of one n-th of the vector each.

In the first n-1 steps partial sums travel once around the ring, each rank adding its own chunk;
in the second n-1 the finished chunks travel around. With N bytes, latency a and b seconds per
byte it takes 2(n-1)(a + bN/n), and 2(n-1)/n N bytes leave each rank, which is the least possible.

When to use it: for long vectors and few ranks, or where only neighbours are well connected. Its
latency grows with n.

`all_to_all` stays direct: messages to each rank alone cannot be merged on the way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.architecture.allreduce._rings import (
    all_reduce,
    gather,
    merge_to_last,
    pass_from_last,
)
from gradwire.architecture.allreduce._sums import addend, divide_sum
from gradwire.core.group import Group, Merging
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture


@dataclass(frozen=True, repr=False)
class Ring(Architecture):
    """Pass partial sums around a ring, then the finished chunks."""

    paper = "Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms"
    examples = ("ring",)

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        # Payloads that do not add are gathered: the other route needs messages between all pairs.
        return RingGroup(node, label, "gather", members)


class RingGroup(Group):
    """Collectives in which every rank sends only to its right neighbour."""

    async def all_gather(self, message: Tensor) -> Sequence[Tensor]:
        return await gather(self, message, self.rank)

    async def mean(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x

        async def finish(chunk: Tensor) -> Tensor:
            return await self.node.call(divide_sum, chunk, self.size)

        return await all_reduce(self, addend(x, self.size), finish)

    async def reduce_tree(self, x: Tensor, merging: Merging) -> Tensor:
        """Merges from rank 0 to the last, which finalizes the result and sends it around."""
        x = await merge_to_last(self, x, merging.merge)
        if self.rank == self.size - 1:
            x = await self.node.call(merging.finalize, x)
        return await pass_from_last(self, x)
