"""All-reduce over direct exchanges: 2 latencies and 2(n-1)/n of the vector per node.

Each rank owns one n-th of the vector, adds up what the others send it and sends the sum to all
(reduce-scatter by pairwise exchange, then all-gather; Thakur et al. 2005, "Optimization of
collective communication operations in MPICH", sec. 4). Compressed payloads take the cheapest
route that their algebra allows: see `core/reducer.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradwire.core.group import Group
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture


@dataclass(frozen=True, repr=False)
class AllReduce(Architecture):
    """Every rank ends with the mean, by the cheapest route the codec allows."""

    # How payloads that cannot be added are averaged: everyone decodes everyone's ("gather"),
    # or shards are averaged by their owner and encoded again ("scatter").
    route: Literal["auto", "gather", "scatter"] = "auto"

    paper = "Thakur et al. 2005, Optimization of collective communication operations in MPICH"

    def __post_init__(self) -> None:
        if self.route not in ("auto", "gather", "scatter"):
            raise ValueError(
                f'allreduce: route is "auto", "gather" or "scatter", got {self.route!r}'
            )

    def group(self, node: Node, label: str, members: Sequence[int] | None = None) -> Group:
        return Group(node, label, self.route, members)
