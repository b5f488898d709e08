"""Sparse ternary compression (Sattler et al. 2019, "Robust and communication-efficient ...").

The k elements of largest magnitude become plus or minus the mean mu of these magnitudes, the others
zero (their Algorithm 1). |x|^2 - |x - C(x)|^2 = k mu^2, which makes it a contraction with
delta = min(k/d, 1/k). Given the sum of the top k and the smallest of them, t, the norm is largest
if one element holds all that is above t and all others equal t. Then k mu^2 / |x|^2 rises and
falls in the sum, so it is least at an end: all elements equal (k/d), or only one counts (1/k).

It leaves a plane of symbols 0, 1 (plus) and 2 (minus), by default Golomb-coded as in the paper:
the gaps between non-zeros, and a bit each.

Use it as `ef(stc(0.01))`, the first choice for a tenth of a bit per element and less, best with
heavy-tailed gradients; `rans` after it gains nothing. `topk(0.01) >> qsgd(bits=4)` keeps more of
such a gradient for some more bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compression.coders.golomb import Golomb
from gradwire.compression.quantization._buckets import clamp_to
from gradwire.compression.sparsification._selection import check_density, largest, num_kept
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    expect_scale,
    scale_dtype,
)
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class STC(Codec):
    """Keep the k largest elements as plus or minus their mean magnitude, Golomb-coded."""

    density: float  # fraction kept

    paper = (
        "Sattler et al. 2019, Robust and communication-efficient federated learning from "
        "non-i.i.d. data"
    )
    examples = ("stc(0.01)", "stc(0.3)", "stc(1.0)")

    leaves = Kind.SYMBOLS
    parts = ("scale", "values")

    def __post_init__(self) -> None:
        check_density("stc", self.density)

    @property
    def coder(self) -> Codec:
        return Golomb()

    def guarantee(self, spec: Spec) -> Guarantee:
        d = max(1, spec.numel)
        k = num_kept(self.density, d)
        return Guarantee(delta=min(k / d, 1 / k))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=3)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        k = num_kept(self.density, x.numel())
        indices = largest(x.abs(), k)
        kept = x[indices]
        # Zeros among the top k of a sparse vector stay zero, and do not lower the mean.
        mean = kept.abs().sum(dtype=torch.float64) / kept.count_nonzero().clamp(min=1)
        symbols = torch.zeros(x.numel(), dtype=torch.uint8, device=x.device)
        symbols[indices] = ((kept > 0) + 2 * (kept < 0)).to(torch.uint8)
        return {"scale": mean.to(scale_dtype(x.dtype)).reshape(1), "values": symbols}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype = scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], 1, dtype)
        levels = torch.tensor([0.0, 1.0, -1.0], dtype=dtype, device=scale.device) * scale
        return clamp_to(levels, spec.dtype)[parts["values"].to(torch.int64)]
