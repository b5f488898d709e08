"""All-reduce by recursive doubling: in round j ranks that differ in bit j swap their sums.

    x_r <- x_r + x_(r xor 2^j),   j = 0 .. log2(n) - 1

With N bytes, latency a and b seconds per byte it takes log2(n) (a + bN) for powers of two (Table
6 of the survey), and log2(n) N bytes leave each rank. Between two rounds a rank holds the sum of
2^j ranks, the same bits on all of these, because both partners add in the order of the ranks.

For n = 2^k + e the first 2e ranks pair up: the odd one hands its vector to the even one, which
takes part for both, and gets the mean in the end (Thakur et al. 2005, "Optimization of collective
communication operations in MPICH", sec. 4.5). That takes

    max((k + 1)(a + bN), (ceil(log2 e) + 2) a + (k + 2) bN)

which is (k + 2)(a + bN) for e > 2^(k-1) and less otherwise: ranks that take part for themselves
only start a round earlier, and what they send waits only at the NIC of its receiver.
This formula was read off the simulator, not derived; tests hold it to 34 ranks.

When to use it: for short vectors, where latencies count and not bytes.

Messages that are gathered double likewise. Payloads that merge go along a binomial tree: merging
twice what two partners hold would take the work, not the time. `all_to_all` stays direct.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.allreduce._sums import addend, divide_sum
from gradwire.core.group import Group
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture


@dataclass(frozen=True, repr=False)
class RecursiveDoubling(Architecture):
    """Swap sums with partners at distance 1, 2, 4, ..."""

    paper = "Thakur et al. 2005, Optimization of collective communication operations in MPICH"
    examples = ("recursive_doubling",)

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        return RecursiveDoublingGroup(node, label, "gather", members)


class RecursiveDoublingGroup(Group):
    """Collectives among 2^k ranks, some of which also act for their neighbour."""

    async def mean(self, x: Tensor) -> Tensor:
        node, tag, after = self.node, self._tag(), self._tag()
        x = addend(x, self.size)
        if self._hands_over:
            await self.send(self.rank - 1, tag, x)
            return await self.recv(self.rank - 1, after)
        if self._is_handed_over:
            x = await node.call(torch.add, x, await self.recv(self.rank + 1, tag))
        for span in self._spans():
            peer = self._member(self._number ^ span)
            await self.send(peer, tag, x)
            other = await self.recv(peer, tag)
            # Shared by all ranks that hold these two sums.
            x = await node.share(torch.add, *((x, other) if self.rank < peer else (other, x)))
        x = await node.share(divide_sum, x, self.size)
        if self._is_handed_over:
            await self.send(self.rank + 1, after, x)
        return x

    async def all_gather(self, message: Tensor) -> list[Tensor]:
        tag = self._tag()
        held = {self.rank: message}
        if self._hands_over:
            await self.send(self.rank - 1, tag, message)
            others = [rank for rank in range(self.size) if rank != self.rank]
            held |= {rank: await self.recv(self.rank - 1, tag) for rank in others}
            return [held[rank] for rank in range(self.size)]
        if self._is_handed_over:
            held[self.rank + 1] = await self.recv(self.rank + 1, tag)
        for span in self._spans():
            other = self._number ^ span
            peer, first = self._member(other), other & -span
            for rank in sorted(held):
                await self.send(peer, tag, held[rank])
            theirs = range(self._member(first), self._member(first + span))
            held |= {rank: await self.recv(peer, tag) for rank in theirs}
        if self._is_handed_over:
            for rank in range(self.size):
                if rank != self.rank + 1:
                    await self.send(self.rank + 1, tag, held[rank])
        return [held[rank] for rank in range(self.size)]

    def _spans(self) -> list[int]:
        return [1 << bit for bit in range(self.size.bit_length() - 1)]

    @property
    def _excess(self) -> int:
        """How many ranks there are beyond a power of two."""
        return self.size - (1 << (self.size.bit_length() - 1))

    @property
    def _hands_over(self) -> bool:
        return self.rank < 2 * self._excess and self.rank % 2 == 1

    @property
    def _is_handed_over(self) -> bool:
        return self.rank < 2 * self._excess and self.rank % 2 == 0

    @property
    def _number(self) -> int:
        """The number of this rank among those that take part."""
        return self.rank // 2 if self.rank < 2 * self._excess else self.rank - self._excess

    def _member(self, number: int) -> int:
        return 2 * number if number < self._excess else number + self._excess
