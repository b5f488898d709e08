"""Which inputs of a polar code are free: those that the test channel leaves the least unknown.

A code of length n with k free inputs is designed for BSC(D) with 1 - h2(D) = k / n. A construction
scores each input, lower where less of it is unknown; the k lowest are free, of equals the last.
`monte_carlo` is made of integers alone, so that both ends find the same set; the common ones come
with the package (`free_sets.py`). The others sort floating-point numbers: between machines whose
logarithms round differently two nearly equal inputs may change places.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.coding.polar import (
    bhattacharyya,
    free_sets,
    gaussian_approximation,
    monte_carlo,
    polarization_weight,
    tal_vardy,
)
from gradwire.coding.polar.cache import cached_tensor
from gradwire.coding.polar.channel import distortion_bound

Construction = Literal[
    "monte_carlo", "tal_vardy", "gaussian_approximation", "bhattacharyya", "polarization_weight"
]
CONSTRUCTIONS: dict[str, Callable[[int, float], Tensor]] = {
    "monte_carlo": monte_carlo.scores,
    "tal_vardy": tal_vardy.scores,
    "gaussian_approximation": gaussian_approximation.scores,
    "bhattacharyya": bhattacharyya.scores,
    "polarization_weight": polarization_weight.scores,
}
assert set(CONSTRUCTIONS) == set(get_args(Construction))


def free_positions(n: int, k: int, construction: str = "monte_carlo") -> Tensor:
    """The free inputs of a code of n = 2^m with k of them, bool [n]; shared: do not write to it."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"a polar code has n = 2^m inputs, got n = {n}")
    if not 0 <= k <= n:
        raise ValueError(f"of {n} inputs 0 .. {n} can be free, got k = {k}")
    if construction not in CONSTRUCTIONS:
        raise ValueError(
            f"there is no construction {construction!r}; there are {', '.join(CONSTRUCTIONS)}"
        )
    return _free_positions(n, k, construction)


@lru_cache(maxsize=256)
def _free_positions(n: int, k: int, construction: str) -> Tensor:
    if construction == "monte_carlo":
        shipped = free_sets.shipped(n, k)
        if shipped is not None:
            return shipped
    if k in (0, n):
        return torch.full((n,), k == n, device="cpu")
    distortion = distortion_bound(k / n)
    if construction == "tal_vardy":  # the one that is slow and not kept where it is computed
        question = f"tal_vardy n {n}, D {distortion.hex()}"
        compute = partial(tal_vardy.scores, n, distortion)
        return lowest(cached_tensor(question, n, torch.float64, compute), k)
    return lowest(CONSTRUCTIONS[construction](n, distortion), k)


def lowest(scores: Tensor, k: int) -> Tensor:
    """Where the k lowest scores are, of equals the last ones, bool [n]."""
    n = scores.numel()
    order = n - 1 - scores.flip(0).argsort(stable=True)
    free = torch.zeros(n, dtype=torch.bool, device="cpu")
    free[order[:k]] = True
    return free
