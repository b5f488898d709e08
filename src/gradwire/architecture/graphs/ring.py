"""Every worker receives from its two neighbours on a circle.

With the weights 1/3 the eigenvalues are (1 + 2 cos(2 pi k / n)) / 3, so the spectral gap is
2/3 (1 - cos(2 pi / n)), about 13 / n^2 (Xiao and Boyd 2004). Two workers exchange once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.graphs._graph import Graph, adjacency_of_edges, metropolis_hastings


@dataclass(frozen=True, repr=False)
class Ring(Graph):
    """A circle: two neighbours each, and slow mixing in large ones."""

    paper = "Xiao and Boyd 2004, Fast linear iterations for distributed averaging"
    examples = ("ring",)

    def weights(self, size: int, step: int) -> Tensor:
        ranks = torch.arange(size)
        return metropolis_hastings(adjacency_of_edges(size, ranks, (ranks + 1) % size))
