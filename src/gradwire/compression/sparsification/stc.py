"""Sparse ternary compression (Sattler et al. 2019, "Robust and communication-efficient ...").

The k elements of largest magnitude become plus or minus the mean mu of these magnitudes, the others
zero. |x|^2 - |x - C(x)|^2 = k mu^2, which makes it a contraction with
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

from gradwire import kernels
from gradwire.compression.coders.golomb import Golomb
from gradwire.compression.sparsification._families import Selector
from gradwire.compression.sparsification._selection import (
    check_density,
    mean_magnitude,
    num_kept,
    scatter,
)
from gradwire.core.codec import (
    Guarantee,
    Kind,
    Parts,
    Traits,
    clamp_to,
    expect_scale,
    scale_dtype,
)
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class STC(Selector):
    """Keep the k largest elements as plus or minus their mean magnitude, Golomb-coded."""

    density: float  # fraction kept

    paper = (
        "Sattler et al. 2019, Robust and communication-efficient federated learning from "
        "non-i.i.d. data"
    )
    examples = ("stc(0.01)", "stc(0.3)", "stc(1.0)")

    leaves = Kind.SYMBOLS
    traits = Traits(biased=True, coder=Golomb())
    parts = ("scale", "values")
    adds_residual = True

    def __post_init__(self) -> None:
        check_density("stc", self.density)

    def guarantee(self, spec: Spec) -> Guarantee:
        d = max(1, spec.numel)
        k = num_kept(self.density, d)
        return Guarantee(delta=min(k / d, 1 / k))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=3)

    def choose(
        self, x: Tensor, key: Key, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return kernels.select_largest(x, residual, num_kept(self.density, x.numel()), out)

    def make_parts(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        # Zeros among the top k of a sparse vector stay zero, and do not lower the mean.
        scale = mean_magnitude(values, int(values.count_nonzero()))
        kinds = ((values > 0) + 2 * (values < 0)).to(torch.uint8)
        return {"scale": scale, "values": scatter(kinds, indices, Spec((numel,), torch.uint8))}

    def decode_values(self, parts: Parts, values: Tensor) -> Tensor:
        return clamp_to(parts["scale"], values.dtype) * values.sign()

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype = scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], 1, dtype)
        symbols = parts["values"]
        num_others = symbols.numel() - int(kernels.count_symbols(symbols, 3)[0])
        where, which = kernels.find_others(symbols, 0, num_others)
        values = clamp_to(torch.where(which == 0, scale, -scale), spec.dtype)
        return scatter(values, where, spec)
