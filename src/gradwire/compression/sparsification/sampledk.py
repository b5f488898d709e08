"""Sampled top-k: the selection of deep gradient compression (Lin et al. 2018, "DGC", sec. 5).

The threshold is what the top fraction `density` of a small random sample reaches; if more than k
elements reach it, an exact top-k among those that did follows (their hierarchical selection). So at
most k are sent, and no pass sorts the whole vector. Sampling errs: on average a few per cent less
than k are sent, so the sample is large enough to have 64 elements above the threshold.

The sample has one element of each of equal strata rather than a uniform subset. Momentum
correction, the rest of DGC, is not a codec's business.

Use it as `ef(sampledk(0.01) >> fp16)` in place of `topk` for long vectors, where an exact selection
takes too long; it sends at most k and errs hardly more. Where time allows, or a guarantee is
wanted, take `topk`.
"""

import math
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._selection import (
    Selection,
    above,
    check_density,
    check_sample,
    encode_positions,
    num_kept,
    sampled_threshold,
)
from gradwire.core.codec import Parts, State, is_finite
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class SampledK(Selection):
    """Keep at most the k largest elements, above a threshold estimated from a sample."""

    density: float  # fraction kept, at most
    sample_ratio: float = 0.001  # fraction of the elements that the threshold is estimated from

    paper = "Lin et al. 2018, Deep gradient compression"
    examples = ("sampledk(0.01)", "sampledk(0.3)", "sampledk(0.1, sample_ratio=0.25)")

    def __post_init__(self) -> None:
        check_density("sampledk", self.density)
        check_sample("sampledk", "sample_ratio", self.sample_ratio)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        k = num_kept(self.density, x.numel())
        threshold = sampled_threshold(x.abs(), self.density, self.sample_ratio, key)
        return self.selected(x, above(x, threshold, target=k, most=k)), state

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        plain = partial(super().encode_feedback, x, residual, state, key)
        if not x.numel() or not kernels.fuses(x, residual):
            return plain()
        flat, kept = x.detach().reshape(-1), residual.detach().reshape(-1)
        k = num_kept(self.density, x.numel())
        threshold = float(sampled_threshold(flat, self.density, self.sample_ratio, key, kept))
        if not 0 < threshold < math.inf:
            return plain()  # zeros are left out, and what is not finite is refused
        lost = kernels.empty(x.numel())
        indices, values = kernels.select_above(flat, kept, threshold, 2 * k, lost)
        if not is_finite(values):
            return plain()
        if len(indices) > k:
            best, largest = kernels.select_largest(values, None, k)
            values[best] = 0  # what is left goes back into the residual
            lost[indices] = values
            indices, values = indices[best], largest
        parts = {"indices": encode_positions(indices, x.numel()), "values": values}
        return Payload.pack(parts, self.context(Spec.of(x))), lost.reshape(x.shape), state
