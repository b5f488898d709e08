"""Every worker receives from every other: all weights are 1/n, and one step is the exact mean."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.graphs._graph import Graph, metropolis_hastings


@dataclass(frozen=True, repr=False)
class Complete(Graph):
    """Every worker receives from every other: the exact mean in one step."""

    examples = ("complete",)

    def weights(self, size: int, step: int) -> Tensor:
        return metropolis_hastings(torch.ones(size, size, dtype=torch.bool).fill_diagonal_(False))
