"""One absolute threshold, estimated (Aji and Heafield 2017, "Sparse communication ...").

All elements whose magnitude reaches the quantile 1 - density of a small random sample are sent as
they are; the rest stays in the residual (`ef`). They sample 0.1% of the elements.

How many pass varies with the sample. We cap it at twice the density, where the largest of those
that passed are sent, so that a bad sample cannot flood the network, and take a sample of at least
64 elements above the quantile. One threshold for the whole model or one per layer is the choice
of the schedule's buckets.

Use it as `ef(aji(0.01) >> fp16)` in place of `topk` where an exact selection takes too long and a
count that varies does no harm; it errs as little. If the count must not exceed k take `sampledk`.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.compression.sparsification._selection import (
    Selection,
    above,
    check_density,
    check_sample,
    num_kept,
    sampled_threshold,
)
from gradwire.core.codec import Parts, State
from gradwire.core.key import Key


@dataclass(frozen=True, repr=False)
class Aji(Selection):
    """Keep all elements above a quantile of magnitudes that a random sample estimates."""

    density: float  # fraction kept, on average; never more than twice that
    sample: float = 0.001  # fraction of the elements that the quantile is estimated from

    paper = "Aji and Heafield 2017, Sparse communication for distributed gradient descent"
    examples = ("aji(0.01)", "aji(0.3)", "aji(0.1, sample=0.25)")

    def __post_init__(self) -> None:
        check_density("aji", self.density)
        check_sample("aji", "sample", self.sample)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        k = num_kept(self.density, x.numel())
        threshold = sampled_threshold(x.abs(), self.density, self.sample, key)
        return self.selected(x, above(x, threshold, target=k, most=2 * k)), state
