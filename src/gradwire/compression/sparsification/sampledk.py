"""Sampled top-k: the selection of deep gradient compression (Lin et al. 2018, "DGC", sec. 5).

The threshold is what the top fraction `density` of a small random sample reaches; if more than k
elements reach it, an exact top-k among those that did follows (their hierarchical selection). So at
most k are sent, and no pass sorts the whole vector. Sampling errs: on average a few per cent less
than k are sent, so the sample is large enough to have 64 elements above the threshold.

The sample has one element of each of equal strata rather than a uniform subset. `dgc(0.01)` adds
momentum correction, the rest of DGC.

For any sample, what is sent are the largest elements, and at least one of a vector that
is not zero: delta = 1/d.

Use it as `ef(sampledk(0.01) >> fp16)` where selection is made of torch operations, as on devices
other than the CPU: there a sample saves the exact selection, which takes several times as long. On
the CPU, in float32, `topk` selects exactly in the same one pass and about the same time, and keeps
exactly k: take `topk`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._families import Selection, Selector
from gradwire.compression.sparsification._selection import (
    above_sampled,
    above_sampled_rows,
    check_density,
    check_sample,
    num_kept,
    top_at_least_one,
)
from gradwire.core.codec import Guarantee
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class SampledK(Selection, Selector):
    """Keep at most the k largest elements, above a threshold estimated from a sample."""

    density: float  # fraction kept, at most
    sample_ratio: float = 0.001  # fraction of the elements that the threshold is estimated from

    paper = "Lin et al. 2018, Deep gradient compression"
    examples = ("sampledk(0.01)", "sampledk(0.3)", "sampledk(0.1, sample_ratio=0.25)")

    adds_residual = True
    takes_motion = True
    chooses_rows = True

    def __post_init__(self) -> None:
        check_density("sampledk", self.density)
        check_sample("sampledk", "sample_ratio", self.sample_ratio)

    def guarantee(self, spec: Spec) -> Guarantee:
        return top_at_least_one(spec)

    def choose(
        self,
        x: Tensor,
        key: Key,
        residual: kernels.Residual | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        most = num_kept(self.density, x.numel())
        return above_sampled(x, self.density, self.sample_ratio, key, most, residual, out)

    def choose_rows(
        self,
        x: Tensor,
        keys: Sequence[Key],
        residual: kernels.Residual | None,
        out: Tensor | None,
    ) -> list[tuple[Tensor, Tensor]]:
        most = num_kept(self.density, x.shape[1])
        return above_sampled_rows(x, self.density, self.sample_ratio, keys, most, residual, out)
