"""SIDCo (Abdelmoniem et al. 2021, "An efficient statistical-based gradient compression technique").

Magnitudes are taken for exponential with mean b, so a fraction r lies above b log(1/r). One fit
does not hold far out in the tail, so it is done in stages, each on what the one before let through:
t_m = t_(m-1) + b_m log(1 / r_m),   b_m the mean excess over t_(m-1) of those above it
(their multi-stage fitting by peaks over threshold, with r_1 ... r_M = density). Linear time: the
later stages look at few elements.

As in the paper each stage but the last lets a quarter through. The paper moves the number of stages
up and down as the counts of the last steps suggest; here there are as many as the density has
quarters in it, or the number given. At densities of 0.1% to 10% that lets 1.0 times k pass in a
Laplacian vector and 1.15 to 1.3 times k in a normal one. What is sent is capped at 2k.

Use it as `ef(sidco(0.01) >> fp16)` for long vectors with exponential tails, where the count then
comes out right without sorting or sampling. The saved gradients, whose tails are heavier, send
little more than half of what was asked for: if the count matters take `sampledk` or `topk`.
"""

import math
from dataclasses import dataclass

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

_STAGE_RATIO = 0.25


@dataclass(frozen=True, repr=False)
class SIDCo(Selection):
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

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        k = num_kept(self.density, x.numel())
        return self.selected(x, above(x, self._threshold(x), target=k, most=2 * k)), state

    def _threshold(self, x: Tensor) -> float:
        tail, threshold = x.to(scale_dtype(x.dtype)).abs(), 0.0
        for ratio in self.ratios():
            if not tail.numel():
                break
            mean = float(tail.sum(dtype=torch.float64)) / tail.numel()
            threshold += (mean - threshold) * math.log(1 / ratio)
            tail = tail[tail >= threshold]
        return threshold
