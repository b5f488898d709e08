"""Every worker sends to those 1, 2, 4, 8, ... ranks further on.

W[i + 2^k mod n, i] = W[i, i] = 1 / (ceil(log2 n) + 1) for k = 0 .. ceil(log2 n) - 1. The matrix is
circulant, hence doubly stochastic. Its spectral gap is 2 / (ceil(log2 n) + 1) for an even n and
larger for an odd one (Ying et al. 2021, prop. 1). There i receives from i + 2^k, the mirror image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.graphs._graph import Graph


@dataclass(frozen=True, repr=False)
class Exponential(Graph):
    """Send to those 1, 2, 4, 8, ... ranks further on: log2 n messages, fast mixing."""

    paper = (
        "Ying et al. 2021, Exponential graph is provably efficient for decentralized deep training"
    )
    examples = ("exponential",)

    @property
    def directed(self) -> bool:
        return True

    def weights(self, size: int, step: int) -> Tensor:
        return circulant(size, [1 << k for k in range((size - 1).bit_length())])


def circulant(size: int, offsets: list[int]) -> Tensor:
    """Every worker sends to the ranks at these offsets; all weights are equal."""
    ranks = torch.arange(size)[:, None]
    weights = torch.zeros(size, size, dtype=torch.float64)
    weights[(ranks + torch.tensor([0, *offsets])) % size, ranks] = 1 / (1 + len(offsets))
    return weights
