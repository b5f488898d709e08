"""SIDCo (Abdelmoniem et al. 2021, "An efficient statistical-based gradient compression technique").

Magnitudes are taken for exponential with mean b, so a fraction r lies above b log(1/r). One fit
does not hold far out in the tail, so it is done in stages, each on what the one before let through:
t_m = t_(m-1) + b_m log(1 / r_m),   b_m the mean excess over t_(m-1) of those above it
(their multi-stage fitting by peaks over threshold, with r_1 ... r_M = density). Linear time: the
later stages look at few elements.

Each stage but the last lets a quarter through, as in the authors' code with a fixed ratio. They can
also move the number of stages up and down as the counts of the last steps suggest; then only the
first lets a quarter through and the others share the rest; here there are as many as the density
has quarters in it, or the number given. At densities of 0.1% to 10% that lets 1.0 times k pass in a
Laplacian vector and 1.15 to 1.3 times k in a normal one. What is sent is capped at 2k.

What is sent are the largest elements, at least one of a vector that is not zero: delta = 1/d.

Use it as `ef(sidco(0.01) >> fp16)` for vectors with exponential tails on devices where sorting is
dear and a pass is cheap: it takes one pass for each stage and one more, so on the CPU it is slower
than `topk`, which selects in one pass. The saved gradients, whose tails are heavier, send little
more than half of what was asked for: if the count matters take `sampledk` or `topk`.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._families import Selection, Selector
from gradwire.compression.sparsification._selection import (
    above,
    check_density,
    in_range,
    num_kept,
    top_at_least_one,
)
from gradwire.core.codec import Guarantee
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_STAGE_RATIO = 0.25


@dataclass(frozen=True, repr=False)
class SIDCo(Selection, Selector):
    """Keep what lies beyond a quantile of exponential distributions fitted to the tail."""

    density: float  # fraction kept, about; never more than twice that
    stages: int = 8  # fits, at most, each to the tail that the one before leaves

    paper = (
        "Abdelmoniem et al. 2021, An efficient statistical-based gradient compression technique "
        "for distributed training systems"
    )
    examples = ("sidco(0.01)", "sidco(0.3)", "sidco(0.1, stages=1)")

    def __post_init__(self) -> None:
        check_density("sidco", self.density)
        if not 1 <= self.stages <= 20:
            raise ValueError(f"sidco: stages must lie in 1 .. 20, got {self.stages}. Try 5.")

    def ratios(self) -> list[float]:
        """The fraction that each stage lets through; their product is the density."""
        quarters = min(self.stages - 1, math.floor(math.log(self.density, _STAGE_RATIO)))
        return [_STAGE_RATIO] * quarters + [self.density / _STAGE_RATIO**quarters]

    def guarantee(self, spec: Spec) -> Guarantee:
        return top_at_least_one(spec)

    def choose(
        self, x: Tensor, key: Key, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        k = num_kept(self.density, x.numel())
        scaled, unit = in_range(x)
        threshold, count = 0.0, x.numel()
        for ratio in self.ratios():
            tails = kernels.tails(scaled, threshold)
            if threshold:
                count = tails.num_above + tails.num_below
            if not count:
                break
            threshold += (tails.outer / count - threshold) * math.log(1 / ratio)
            if not 0 <= threshold < math.inf:
                break  # rounding took it below zero, or something is not finite
        return above(x, max(0.0, threshold) * unit, k, 2 * k)
