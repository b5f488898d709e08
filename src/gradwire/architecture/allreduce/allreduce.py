"""All-reduce over direct exchanges, in one round or in two.

In two rounds ("direct") each rank owns one n-th of the vector, adds up what the others send it
and sends the mean to all: reduce-scatter by pairwise exchange, then all-gather (Thakur et al.
2005, "Optimization of collective communication operations in MPICH", sec. 4). With N bytes,
latency a and b seconds per byte this takes 2(a + (n-1)/n bN), and 2(n-1)/n N bytes leave each
rank: as few as around a ring, at two latencies.

In one round ("gather") every rank sends its whole vector to all others: a + (n-1)bN.

`auto` gathers between two ranks, where the bytes are the same, and where the vector has fewer
elements than there are ranks, so that some would own nothing. It looks at sizes only, never at
the network: what is computed must not depend on the bandwidth. Both ways add in the order of the
ranks and give the same bits. An engine that has an all-reduce of its own may use that instead
where it can (`Node.native`): it adds in another order. Here 16-bit floats are added in float32.

When to use it: whenever every worker reaches every other at full speed. Compressed payloads take
the cheapest route that their algebra allows: see `core/lifted.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradwire.core.exchange import as_argument
from gradwire.core.group import Group, mean_in_order
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture

Algorithm = Literal["auto", "direct", "gather"]


@dataclass(frozen=True, repr=False)
class AllReduce(Architecture):
    """Every rank ends with the mean, by the cheapest route the codec allows."""

    # How payloads that cannot be added are averaged: every rank decodes all payloads ("gather"),
    # or shards are averaged by their owner and encoded again ("scatter").
    route: Literal["auto", "gather", "scatter"] = "auto"
    algorithm: Algorithm = "auto"  # how vectors are averaged

    paper = "Thakur et al. 2005, Optimization of collective communication operations in MPICH"
    examples = ("allreduce", 'allreduce(algorithm="direct")', 'allreduce(algorithm="gather")')

    def __post_init__(self) -> None:
        if self.route not in ("auto", "gather", "scatter"):
            raise ValueError(
                f'allreduce: route is "auto", "gather" or "scatter", got {self.route!r}'
            )
        if self.algorithm not in ("auto", "direct", "gather"):
            raise ValueError(
                f'allreduce: algorithm is "auto", "direct" or "gather", got {self.algorithm!r}'
            )

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        return DirectGroup(node, label, self.route, members, self.algorithm)


class DirectGroup(Group):
    """Collectives with direct messages between all pairs."""

    def __init__(
        self,
        node: Node,
        label: str,
        route: str,
        members: Sequence[int] | None,
        algorithm: Algorithm,
    ) -> None:
        super().__init__(node, label, route, members)
        self.algorithm = algorithm

    async def mean(self, x: Tensor) -> Tensor:
        if self.size == 1:
            return x
        small = self.size == 2 or x.numel() < self.size
        gathers = self.algorithm == "gather" or (self.algorithm == "auto" and small)
        is_whole = self.is_everyone and self.gate is None
        if self.node.native and is_whole and x.is_floating_point():
            mean = await self.node.native_mean(x, self._sends(x, gathers), self.label)
            if mean is not None:
                return mean
        if gathers:
            gathered = await self.all_gather(x)
            return await self.node.share(mean_in_order, as_argument(gathered), self.size)
        return await super().mean(x)

    def _sends(self, x: Tensor, gathers: bool) -> list[tuple[int, int]]:
        """The messages of `mean`: receivers and sizes in bytes."""
        peers = [(self.rank + shift) % self.size for shift in range(1, self.size)]
        nbytes = [piece.numel() * x.element_size() for piece in x.tensor_split(self.size)]
        if gathers:
            return [(self.members[peer], sum(nbytes)) for peer in peers]
        own = nbytes[self.rank]
        scattered = [(self.members[peer], nbytes[peer]) for peer in peers]
        return scattered + [(self.members[peer], own) for peer in peers]
