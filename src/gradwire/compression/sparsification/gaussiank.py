"""Gaussian top-k (Shi et al. 2019, "Understanding top-k sparsification ...").

If the elements were normal with the mean and deviation found, a fraction density of them would lie
beyond t = mean + z deviation, z the normal quantile of 1 - density / 2. Real gradients have
heavier tails, so t is adjusted: while fewer than 2k/3 pass, t <- t / 2; while more
than 4k/3 pass, t <- 1.5 t; at most four times. Every pass is linear in the number of elements.

We take |mean|, because it is magnitudes that are compared, and cap what is sent at 2k (the
largest of those that pass): halving may let through far too many. If no element passes in the
end, an exact top-k is sent.

What is sent are the largest elements, at least one of a vector that is not zero: delta = 1/d.

Use it as `ef(gaussiank(0.01) >> fp16)` where gradients are near normal or the count may be off: of
a Laplacian vector it sends about a quarter of what was asked for. If the count matters take `topk`,
or `sampledk`, which assumes no distribution.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._families import Selection, Selector
from gradwire.compression.sparsification._selection import (
    above,
    check_density,
    in_range,
    num_kept,
    reaching,
    top_at_least_one,
)
from gradwire.core.codec import Guarantee, is_finite
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_ROUNDS = 4


@dataclass(frozen=True, repr=False)
class GaussianK(Selection, Selector):
    """Keep what lies beyond a quantile of the normal distribution fitted to the elements."""

    density: float  # fraction kept, about; never more than twice that

    paper = "Shi et al. 2019, Understanding top-k sparsification in distributed deep learning"
    examples = ("gaussiank(0.01)", "gaussiank(0.3)", "gaussiank(1.0)")

    def __post_init__(self) -> None:
        check_density("gaussiank", self.density)

    def guarantee(self, spec: Spec) -> Guarantee:
        return top_at_least_one(spec)

    def choose(
        self, x: Tensor, key: Key, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        k = num_kept(self.density, x.numel())
        scaled, unit = in_range(x)
        total, squares = kernels.moments(scaled)
        mean = total / max(1, x.numel())
        deviation = math.sqrt(max(0.0, squares / max(1, x.numel()) - mean * mean))
        threshold = abs(mean) + NormalDist().inv_cdf(1 - self.density / 2) * deviation
        found = reaching(x, threshold * unit, 2 * k)
        passed = len(found[0])
        if 2 * k <= 3 * passed <= 4 * k or not is_finite(found[1]):
            return found
        for _ in range(_ROUNDS - 1):
            threshold *= 0.5 if 3 * passed < 2 * k else 1.5
            tails = kernels.tails(x, threshold * unit)
            passed = tails.num_above + tails.num_below
            if 2 * k <= 3 * passed <= 4 * k:
                break
        else:
            threshold *= 0.5 if 3 * passed < 2 * k else 1.5
        return above(x, threshold * unit, k, 2 * k)
