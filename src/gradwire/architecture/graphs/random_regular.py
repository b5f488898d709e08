"""A random graph in which every worker has the same number of neighbours.

From a regular graph, two random edges a-b, c-d are replaced by a-c, b-d wherever the graph stays
simple. These switches reach every simple regular graph, and all are equally likely in the limit
(Taylor 1981, Constrained switchings in graphs); ten tries per edge are made, and more until the
graph is connected. Random regular graphs of degree 3 or more are nearly the best expanders there
are (Friedman 2008): their gap falls with n, but to a value above zero.

The key is shared, so all ranks draw the same graph; `seed` gives another one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.graphs._graph import Graph, adjacency_of_edges, metropolis_hastings
from gradwire.core.key import Key

_TRIES = 10  # switches tried per edge in each round
_ROUNDS = 1000


@dataclass(frozen=True, repr=False)
class RandomRegular(Graph):
    """A random connected graph in which every worker has `degree` neighbours."""

    degree: int
    seed: int = 0

    paper = "Friedman 2008, A proof of Alon's second eigenvalue conjecture and related problems"
    examples = ("random_regular(4)", "random_regular(2, seed=1)")

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ValueError(f"random_regular: degree must be at least 1, got {self.degree}")
        Key(self.seed)  # refuses a bad one

    def weights(self, size: int, step: int) -> Tensor:
        self._check(size)
        edges = _circulant_edges(size, self.degree)
        key = Key(self.seed).child("random_regular").child(size)
        for round_ in range(_ROUNDS):
            edges = _switched(edges, key.child(round_))
            a, b = torch.tensor(edges).T
            adjacency = adjacency_of_edges(size, a, b)
            if _connected(adjacency):
                return metropolis_hastings(adjacency)
        raise ValueError(
            f"{self!r}: no connected graph of {size} found in {_ROUNDS} rounds. "
            "Take another seed or a larger degree."
        )

    def _check(self, size: int) -> None:
        if self.degree >= size:
            raise ValueError(
                f"{self!r}: {size} workers have at most {size - 1} neighbours each. "
                f"Take a degree below {size}, or complete."
            )
        if self.degree * size % 2:
            raise ValueError(
                f"{self!r}: {size} workers of {self.degree} neighbours each would make "
                f"{self.degree * size} ends of edges, an odd number. Take an even degree."
            )
        if self.degree == 1 and size > 2:
            raise ValueError(
                f"{self!r}: with one neighbour each, {size} workers fall into pairs that never "
                "agree. Take degree 2 or more, or matching."
            )


def _circulant_edges(size: int, degree: int) -> list[tuple[int, int]]:
    """Neighbours at distance 1 .. degree/2 on a circle, and opposite ones for an odd degree."""
    edges = [(i, (i + k) % size) for k in range(1, degree // 2 + 1) for i in range(size)]
    return edges + ([(i, i + size // 2) for i in range(size // 2)] if degree % 2 else [])


def _switched(edges: list[tuple[int, int]], key: Key) -> list[tuple[int, int]]:
    edges = list(edges)
    there = {frozenset(edge) for edge in edges}
    tries = _TRIES * len(edges)
    picked = key.child("edges").integers(2 * tries, len(edges)).reshape(-1, 2).tolist()
    turned = key.child("ends").integers(tries, 2).tolist()
    for (first, second), turn in zip(picked, turned):
        a, b = edges[first]
        c, d = edges[second] if turn else edges[second][::-1]
        one, other = frozenset((a, c)), frozenset((b, d))
        # Four different ends and no double edge: what comes out is simple again.
        if len({a, b, c, d}) < 4 or one in there or other in there:
            continue
        there -= {frozenset((a, b)), frozenset((c, d))}
        there |= {one, other}
        edges[first], edges[second] = (a, c), (b, d)
    return edges


def _connected(adjacency: Tensor) -> bool:
    reached = torch.zeros(len(adjacency), dtype=torch.bool)
    reached[0] = True
    while True:
        further = reached | adjacency[reached].any(dim=0)
        if bool((further == reached).all()):
            return bool(reached.all())
        reached = further
