"""Rank 0 receives from all others, and they receive from rank 0.

The hub has degree n - 1, so all weights of edges are 1/n and a leaf keeps 1 - 1/n of its own: the
spectral gap is 1/n. That is no parameter server, which forms the mean in two messages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.graphs._graph import Graph, adjacency_of_edges, metropolis_hastings


@dataclass(frozen=True, repr=False)
class Star(Graph):
    """All receive from rank 0 and it receives from all: few edges, one crowded worker."""

    examples = ("star",)

    def weights(self, size: int, step: int) -> Tensor:
        leaves = torch.arange(1, size)
        return metropolis_hastings(adjacency_of_edges(size, torch.zeros_like(leaves), leaves))
