"""Two workers are neighbours if their ranks differ in one bit.

With k = log2 n and all weights 1 / (k + 1) the eigenvalues are 1 - 2j / (k + 1), j = 0 .. k: the
spectral gap is 2 / (k + 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.graphs._graph import Graph, adjacency_of_edges, metropolis_hastings


@dataclass(frozen=True, repr=False)
class Hypercube(Graph):
    """Neighbours differ in one bit of their ranks; needs a power of two of workers."""

    examples = ("hypercube",)

    def weights(self, size: int, step: int) -> Tensor:
        bits = size.bit_length() - 1
        if size != 1 << bits:
            raise ValueError(
                f"hypercube needs a power of two of workers, got {size}. "
                f"Take {1 << bits} or {2 << bits}, or try exponential or torus."
            )
        ranks = torch.arange(size)[:, None]
        across = ranks ^ (1 << torch.arange(bits))  # [n, k]
        return metropolis_hastings(adjacency_of_edges(size, ranks, across))
