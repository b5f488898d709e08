"""One absolute threshold, estimated (Aji and Heafield 2017, "Sparse communication ...").

All elements whose magnitude reaches the quantile 1 - density of a small random sample are sent as
they are; the rest stays in the residual (`ef`). They sample 0.1% of the elements.

How many pass varies with the sample. We cap it at twice the density, where the largest of those
that passed are sent, so that a bad sample cannot flood the network, and take a sample of at least
64 elements above the quantile. One threshold for the whole model or one per layer is the choice
of the schedule's buckets.

What is sent are the largest elements, at least one of a vector that is not zero: delta = 1/d.

Use it as `ef(aji(0.01) >> fp16)` where selection is made of torch operations, as on devices other
than the CPU, and a count that varies by an eighth does no harm: it is the cheapest selection there.
On the CPU, in float32, `topk` takes hardly longer and keeps exactly k. If the count must not exceed
k take `sampledk`.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.compression.sparsification._families import Selection, Selector
from gradwire.compression.sparsification._selection import (
    above_sampled,
    check_density,
    check_sample,
    num_kept,
    top_at_least_one,
)
from gradwire.core.codec import Guarantee
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Aji(Selection, Selector):
    """Keep all elements above a quantile of magnitudes that a random sample estimates."""

    density: float  # fraction kept, on average; never more than twice that
    sample: float = 0.001  # fraction of the elements that the quantile is estimated from

    paper = "Aji and Heafield 2017, Sparse communication for distributed gradient descent"
    examples = ("aji(0.01)", "aji(0.3)", "aji(0.1, sample=0.25)")

    adds_residual = True

    def __post_init__(self) -> None:
        check_density("aji", self.density)
        check_sample("aji", "sample", self.sample)

    def guarantee(self, spec: Spec) -> Guarantee:
        return top_at_least_one(spec)

    def choose(
        self, x: Tensor, key: Key, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        most = 2 * num_kept(self.density, x.numel())
        return above_sampled(x, self.density, self.sample, key, most, residual, out)
