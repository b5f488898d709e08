"""In each step the workers meet in random pairs and average.

A uniformly random perfect matching M_t is drawn from a key that all ranks hold; W_t[i, j] = 1/2 for
i = j and for pairs. With an odd number of workers one is left out. MATCHA (Wang et al. 2019) draws
several matchings out of a decomposition of a given graph; this is one, out of all of them.

W is a projection, so E[W^T W] = E[W]. A pair meets with probability 1 / (n - 1), or 1/n if n is
odd: on vectors of mean zero E[W] is (n - 2) / (2 (n - 1)), or 1/2.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from gradwire.architecture.graphs._graph import Graph, adjacency_of_edges, metropolis_hastings
from gradwire.core.key import Key


@dataclass(frozen=True, repr=False)
class Matching(Graph):
    """Random pairs, new in each step, average: one message per worker."""

    seed: int = 0

    paper = (
        "Wang et al. 2019, MATCHA: Speeding up decentralized SGD via matching decomposition "
        "sampling"
    )
    examples = ("matching", "matching(7)")

    def __post_init__(self) -> None:
        Key(self.seed)  # refuses a bad one

    @property
    def varies(self) -> bool:
        return True

    def period(self, size: int) -> int | None:
        return None

    def weights(self, size: int, step: int) -> Tensor:
        order = Key(self.seed).at(step).child("matching").permutation(size)
        pairs = order[: size - size % 2].reshape(-1, 2)
        return metropolis_hastings(adjacency_of_edges(size, pairs[:, 0], pairs[:, 1]))

    def spectral_gap(self, size: int) -> float:
        if size <= 2:
            return 1.0
        expected = 0.5 if size % 2 else (size - 2) / (2 * (size - 1))
        return 1 - math.sqrt(expected)
