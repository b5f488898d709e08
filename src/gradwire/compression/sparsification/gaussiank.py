"""Gaussian top-k (Shi et al. 2019, "Understanding top-k sparsification ...", Algorithm 1).

If the elements were normal with the mean and deviation found, a fraction density of them would lie
beyond t = mean + z deviation, z the normal quantile of 1 - density / 2. Real gradients have
heavier tails, so t is adjusted: while fewer than 2k/3 pass, t <- t / 2; while more
than 4k/3 pass, t <- 1.5 t; at most four times. Every pass is linear in the number of elements.

We take |mean|, because it is magnitudes that are compared, and cap what is sent at 2k (the
largest of those that pass): halving may let through far too many. If no element passes in the
end, an exact top-k is sent.

Use it as `ef(gaussiank(0.01) >> fp16)` where gradients are near normal or the count may be off: of
a Laplacian vector it sends about a quarter of what was asked for. If the count matters take `topk`,
or `sampledk`, which assumes no distribution.
"""

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from gradwire.compression.sparsification._selection import (
    Selection,
    above,
    check_density,
    num_kept,
)
from gradwire.core.codec import Parts, State, scale_dtype
from gradwire.core.key import Key

_ROUNDS = 4


@dataclass(frozen=True, repr=False)
class GaussianK(Selection):
    """Keep what lies beyond a quantile of the normal distribution fitted to the elements."""

    density: float  # fraction kept, about; never more than twice that

    paper = "Shi et al. 2019, Understanding top-k sparsification in distributed deep learning"
    examples = ("gaussiank(0.01)", "gaussiank(0.3)", "gaussiank(1.0)")

    def __post_init__(self) -> None:
        check_density("gaussiank", self.density)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        k = num_kept(self.density, x.numel())
        return self.selected(x, above(x, self._threshold(x, k), target=k, most=2 * k)), state

    def _threshold(self, x: Tensor, k: int) -> float:
        if not x.numel():
            return 0.0
        mean = x.sum(dtype=torch.float64) / x.numel()
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
        deviation = (norm.square() / x.numel() - mean.square()).clamp(min=0).sqrt()
        z = NormalDist().inv_cdf(1 - self.density / 2)
        threshold = float(mean.abs() + z * deviation)
        magnitude = x.to(scale_dtype(x.dtype)).abs()
        for _ in range(_ROUNDS):
            passed = int((magnitude >= threshold).sum())
            if 3 * passed < 2 * k:
                threshold *= 0.5
            elif 3 * passed > 4 * k:
                threshold *= 1.5
            else:
                break
        return threshold
