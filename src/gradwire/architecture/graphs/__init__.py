"""Graphs for gossip: the neighbours of each worker, and the weights of their models."""

from gradwire.architecture.graphs._graph import (
    Graph,
    check_column_stochastic,
    check_doubly_stochastic,
    describe,
    metropolis_hastings,
    spectral_gap,
)
from gradwire.core.registry import Registry

GRAPHS = Registry("graph", Graph, __name__, group="gradwire.graphs")  # type: ignore[type-abstract]

__all__ = [
    "GRAPHS",
    "Graph",
    "check_column_stochastic",
    "check_doubly_stochastic",
    "describe",
    "metropolis_hastings",
    "spectral_gap",
]
