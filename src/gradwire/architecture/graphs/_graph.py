"""What all graphs share: mixing matrices, their weights, and how fast they mix.

Gossip replaces the mean of all by x_i <- sum_j W[i, j] x_j over the neighbours j of i. If W is
doubly stochastic, the mean of all x stays as it is, and the distance from it shrinks in each step
by the factor rho = ||W - 11^T/n||_2 or more. 1 - rho is the spectral gap. For a symmetric W it is
1 minus the second largest |eigenvalue| (Xiao and Boyd 2004, Fast linear iterations for distributed
averaging); for a directed one, rho is the largest singular value on vectors of mean zero.

A graph that changes from step to step is rated by what it does per step, so that all gaps compare:
1 - rho^(1/k), with rho of the product over a period of k steps, or 1 - sqrt(||E[W^T W] - 11^T/n||)
for random matrices (Boyd et al. 2006, Randomized gossip algorithms), since E|W x|^2 <= that norm
times |x|^2 for x of mean zero.

Undirected graphs have the weights of Metropolis and Hastings, which need nothing but the degrees
of neighbours: w_ij = 1 / (1 + max(d_i, d_j)), and the rest of the row is w_ii (Xiao, Boyd and Lall
2005, A scheme for robust distributed sensor fusion based on average consensus).
"""

from abc import ABC, abstractmethod
from functools import lru_cache, reduce

import torch
from torch import Tensor

from gradwire.core.notation import Expression

_TOLERANCE = 1e-6  # of sums: what matrices in files and in float32 are good for
_ROUNDING_NORM = 1e-12  # a norm below it is a rounding error, whose root would look significant


class Graph(Expression, ABC):
    """A graph for gossip: the neighbours of each worker, and the weights of their models."""

    @property
    def directed(self) -> bool:
        """Whether W[i, j] may differ from W[j, i]."""
        return False

    @property
    def varies(self) -> bool:
        """Whether the matrix changes from step to step."""
        return False

    def period(self, size: int) -> int | None:
        """Steps after which the matrices come again; None if they are drawn for ever."""
        return 1

    def matrix(self, size: int, step: int = 0) -> Tensor:
        """W [n, n], float64: W[i, j] is the weight that i gives to j; doubly stochastic.

        The tensor is shared: do not change it. A single worker has the matrix [[1]], whatever the
        graph.
        """
        if size < 1:
            raise ValueError(f"{self!r} needs at least one worker, got {size}")
        if step < 0:
            raise ValueError(f"{self!r}: step must not be negative, got {step}")
        period = self.period(size)
        return _matrix(self, size, step if period is None else step % period)

    @abstractmethod
    def weights(self, size: int, step: int) -> Tensor:
        """Makes the matrix of a step within the period, for two workers or more."""

    def spectral_gap(self, size: int) -> float:
        """How much of the distance from the mean a step takes away at worst: 1 - rho."""
        period = self.period(size)
        assert period is not None, f"{self!r} must know its expectation"
        # The newest matrix stands on the left: x_k = W_{k-1} ... W_0 x_0.
        product = reduce(
            lambda so_far, w: w @ so_far, (self.matrix(size, t) for t in range(period))
        )
        return 1 - (1 - spectral_gap(product)) ** (1 / period)


@lru_cache(maxsize=32)
def _matrix(graph: Graph, size: int, step: int) -> Tensor:
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    return graph.weights(size, step)


def metropolis_hastings(adjacency: Tensor) -> Tensor:
    """The weights of an undirected graph, given its adjacency matrix [n, n] of bools."""
    assert adjacency.dtype == torch.bool
    assert not adjacency.diagonal().any()
    assert bool((adjacency == adjacency.T).all())
    degree = adjacency.sum(dim=1).to(torch.float64)
    weights = adjacency / (1 + torch.maximum(degree[:, None], degree[None, :]))
    return weights + torch.diag(1 - weights.sum(dim=1))


def adjacency_of_edges(size: int, a: Tensor, b: Tensor) -> Tensor:
    """The adjacency matrix of edges a[k] - b[k]; a worker is not its own neighbour."""
    adjacency = torch.zeros(size, size, dtype=torch.bool)
    adjacency[a, b] = True
    adjacency[b, a] = True
    return adjacency.fill_diagonal_(False)


def check_doubly_stochastic(matrix: Tensor, what: str) -> None:
    """Refuses a matrix that would not keep the mean, naming the row or column and its sum."""
    check_column_stochastic(matrix, what)
    _check_sums(
        matrix.sum(dim=1),
        "row",
        what,
        "Rows and columns must all sum to one for gossip to keep the mean; sgp does without the "
        "rows.",
    )


def check_column_stochastic(matrix: Tensor, what: str) -> None:
    """Refuses a matrix whose columns do not sum to one: part of a worker's share would be lost."""
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"{what}: a mixing matrix is square, got shape {list(matrix.shape)}")
    wrong = (~(matrix.isfinite() & (matrix >= 0))).nonzero()
    if len(wrong):
        i, j = wrong[0].tolist()
        raise ValueError(
            f"{what}: weights are finite and not negative, but that of row {i}, column {j} is "
            f"{matrix[i, j].item():g} (counted from 0)"
        )
    _check_sums(matrix.sum(dim=0), "column", what, "What rank k gives away must be all it has.")


def is_doubly_stochastic(matrix: Tensor) -> bool:
    """Of a matrix whose columns sum to one: whether its rows do."""
    return bool(((matrix.sum(dim=1) - 1).abs() <= _TOLERANCE).all())


def _check_sums(sums: Tensor, name: str, what: str, why: str) -> None:
    off = ((sums - 1).abs() > _TOLERANCE).nonzero()
    if len(off):
        k = int(off[0])
        raise ValueError(
            f"{what}: {name} {k} (counted from 0) sums to {sums[k].item():.7g}, must be 1. {why}"
        )


def spectral_gap(matrix: Tensor) -> float:
    """1 - ||W - 11^T/n||_2 of a doubly stochastic matrix: 1 if one step is the mean, 0 if it is
    nothing for some. Of others 1 - |second largest eigenvalue|, how fast push-sum forgets."""
    if not is_doubly_stochastic(matrix):
        return max(0.0, 1 - float(torch.linalg.eigvals(matrix).abs().sort().values[-2]))
    rho = float(torch.linalg.matrix_norm(matrix - 1 / len(matrix), ord=2))
    return 1.0 if rho < _ROUNDING_NORM else max(0.0, 1 - rho)


def describe(graph: Graph, size: int) -> str:
    """One line: `ring of 8: doubly stochastic, spectral gap 0.195, 2 neighbours`."""
    matrix = graph.matrix(size)
    check_column_stochastic(matrix, f"{graph!r} of {size}")
    in_degrees = (matrix != 0).fill_diagonal_(False).sum(dim=1)
    fewest, most = int(in_degrees.min()), int(in_degrees.max())
    number = str(most) if fewest == most else f"{fewest} to {most}"
    balanced = is_doubly_stochastic(matrix)
    parts = ["doubly stochastic" if balanced else "columns sum to one, rows do not (for sgp)"]
    if graph.directed:
        parts.append("directed")
    gap, period = graph.spectral_gap(size), graph.period(size)
    if period is None:
        parts.append(f"spectral gap {gap:.3g} expected per step")
    elif period == 1:
        parts.append(f"spectral gap {gap:.3g}")
    elif gap == 1:
        parts.append(f"the exact mean after {period} steps")
    else:
        parts.append(f"spectral gap {gap:.3g} per step over {period} steps")
    parts.append(f"{number} neighbour{'' if number == '1' else 's'}")
    if graph.varies:
        parts[-1] += " in each step"
    return f"{graph!r} of {size}: {', '.join(parts)}"
