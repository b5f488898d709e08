"""A grid whose rows and columns are rings, as square as the number of workers allows.

The number of rows is the largest divisor up to sqrt(n): 12 workers are 3 x 4, a prime number of
them is one ring. With r, c >= 3 all weights are 1/5 and the eigenvalues
(1 + 2 cos(2 pi i / r) + 2 cos(2 pi j / c)) / 5; the spectral gap is 2/5 (1 - cos(2 pi / c)) for
c >= 4, so it falls like 1/n where that of a ring falls like 1/n^2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.graphs._graph import Graph, adjacency_of_edges, metropolis_hastings


@dataclass(frozen=True, repr=False)
class Torus(Graph):
    """A grid that wraps around, as square as possible: up to four neighbours each."""

    paper = "Xiao and Boyd 2004, Fast linear iterations for distributed averaging"
    examples = ("torus",)

    def weights(self, size: int, step: int) -> Tensor:
        rows = max(r for r in range(1, math.isqrt(size) + 1) if size % r == 0)
        grid = torch.arange(size).reshape(rows, -1)
        beside = torch.cat([grid.roll(-1, dims=1).flatten(), grid.roll(-1, dims=0).flatten()])
        return metropolis_hastings(adjacency_of_edges(size, grid.flatten().repeat(2), beside))
