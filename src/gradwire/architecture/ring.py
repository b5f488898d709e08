"""Ring all-reduce (Patarasuk and Yuan 2009): 2(n-1) steps of one n-th of the vector each.

In the first n-1 steps partial sums travel once around the ring, each rank adding its own chunk;
in the second n-1 the finished chunks travel around. On n nodes of one bandwidth B and latency a,
a vector of s bytes takes 2(n-1)(a + s/(nB)).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.group import Group, concatenate, is_half
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture


@dataclass(frozen=True, repr=False)
class Ring(Architecture):
    """Pass partial sums around a ring, then the finished chunks."""

    paper = "Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms"

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        # Payloads that do not add are gathered: the other road sends from everyone to everyone.
        return RingGroup(node, label, "gather", members)


class RingGroup(Group):
    """Collectives in which every rank sends only to its right neighbour."""

    async def all_gather(self, message: Tensor) -> list[Tensor]:
        gathered = [message] * self.size
        await self._pass_around(gathered, self.rank)
        return gathered

    async def mean(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        node, tag = self.node, self._tag()
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if is_half(x):
            x = x / self.size  # now, because partial sums of 16 bits could overflow
        chunks: list[Tensor] = list(x.tensor_split(self.size))
        for turn in range(self.size - 1):
            leaving, coming = (self.rank - turn) % self.size, (self.rank - turn - 1) % self.size
            await self.send(right, tag, chunks[leaving])
            partial = await self.recv(left, tag)
            chunks[coming] = await node.call(torch.add, partial, chunks[coming])
        # Rank r now holds the finished chunk r + 1.
        if not is_half(x):
            chunks[right] = chunks[right] / self.size
        await self._pass_around(chunks, right)
        return await node.share(concatenate, tuple(chunks))

    async def reduce_tree(
        self,
        x: Tensor,
        merge: Callable[[Tensor, Tensor], Tensor],
        settle: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Tensor:
        """Merges from rank 0 to the last, which settles the result and sends it around."""
        node, up, down = self.node, self._tag(), self._tag()
        right, left, last = (self.rank + 1) % self.size, (self.rank - 1) % self.size, self.size - 1
        if self.rank > 0:
            x = await node.call(merge, await self.recv(left, up), x)
        if self.rank < last:
            await self.send(right, up, x)
            x = await self.recv(left, down)
        else:
            x = await node.call(settle, x)
        if self.size > 1 and self.rank != last - 1:
            await self.send(right, down, x)
        return x

    async def _pass_around(self, pieces: list[Tensor], first: int) -> None:
        """Fills `pieces`, of which this rank holds number `first`, in n-1 steps."""
        tag = self._tag()
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        for turn in range(self.size - 1):
            leaving = (first - turn) % self.size
            await self.send(right, tag, pieces[leaving])
            pieces[(leaving - 1) % self.size] = await self.recv(left, tag)
