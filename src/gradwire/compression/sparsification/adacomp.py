"""AdaComp (Chen et al. 2018, "AdaComp: adaptive residual gradient compression").

With G = residual + dW (here the input, under `ef`) and H = G + dW, cut into bins of T elements:
where |H_j| >= the largest |G| of its bin, sign(G_j) s is sent, s the mean over bins of these
maxima; all else stays in the residual. An element that has grown as fast as the largest is sent
before it is the largest, so busy bins send more: the rate adapts to the layer. The paper's T is 50
for convolutions and 500 elsewhere.

A codec sees G alone. Its state holds the residual it must have left in the step before, so under
`ef` dW = G - residual is exact. Where that is not known (the first step, an inner stage of a
chain) dW = G, that is, everything from half of the bin's maximum on is sent. Elements where G is
zero are never sent. Positions are coded over the whole tensor, not in 8 or 16 bits per bin.

Use it as `ef(adacomp)` where no density is to be chosen: layers and steps with large changes send
more automatically. Where the traffic must be known beforehand take `ef(stc(0.01))`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compression.quantization._buckets import from_buckets, to_buckets
from gradwire.compression.sparsification._families import SignedSelection
from gradwire.compression.sparsification._selection import matching_memory, mean_magnitude
from gradwire.core.codec import Parts, State, Traits, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class AdaComp(SignedSelection):
    """Send the sign of elements that grow as fast as the largest of their bin. Needs ef."""

    bin: int = 500  # elements among which one is the largest; the paper's 50 for convolutions

    paper = (
        "Chen et al. 2018, AdaComp: adaptive residual gradient compression for data-parallel "
        "distributed training"
    )
    examples = ("adacomp", "adacomp(50)", "adacomp(4)")

    parts = ("indices", "scale", "values")
    traits = Traits(needs_feedback=True)

    def __post_init__(self) -> None:
        if self.bin < 1:
            raise ValueError(
                f"adacomp: bin must be at least 1 element, got {self.bin}. The paper takes 50 "
                "for convolutions and 500 for other layers."
            )

    def init(self, spec: Spec) -> State:
        return torch.zeros(spec.numel, dtype=spec.dtype)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        residual = matching_memory(state, x)
        dtype = scale_dtype(x.dtype)
        total = x.to(dtype)
        # Halves, because the sum of two large elements may overflow.
        half = total / 2
        latest = half if residual is None else half - residual.to(dtype) / 2
        bins = to_buckets(total.abs(), self.bin)  # [num_bins, bin]
        most = bins.amax(dim=1) if x.numel() else bins.new_zeros(0)
        rivals = to_buckets((half + latest).abs(), self.bin) >= most[:, None] / 2
        sent = from_buckets(rivals, x.numel()) & (x != 0)
        scale = mean_magnitude(most, len(most))
        where = sent.nonzero().reshape(-1)
        parts = {**self.make_parts(where, x[where], x.numel()), "scale": scale}
        if residual is not None:
            state = x - self.join(parts, Spec.of(x), key)
        return parts, state

    def means(self, parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale = expect_scale(parts["scale"], 1, scale_dtype(dtype))
        return scale, scale
