"""Sparse binary compression (Sattler et al. 2019, "Sparse binary compression").

mu+ is the mean of the k largest elements, mu- the mean of the k largest of -x. The side with the
larger mean is sent: its k positions and that one number; everything else stays in the residual
(`ef`). There is no bit per value, so a message is its positions, about 8 bits each at 1%.

The sign of the side travels as the sign of the mean. |x|^2 - |x - C(x)|^2 = k mu^2, so it never
makes things worse, but a bound that is positive for every x does not exist (k = d, mean zero).

Use it as `ef(sbc(0.01))` at the very lowest rates, where even the bit of a sign is too much.
`ef(stc(0.01))` costs little more and keeps more of the gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression.sparsification._families import Selector
from gradwire.compression.sparsification._selection import (
    check_density,
    extremes,
    in_range,
    largest,
    num_kept,
    scatter,
)
from gradwire.core.codec import Kind, Parts, clamp_to, expect, is_finite, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class SBC(Selector):
    """Send where the k most positive or the k most negative elements are, and their mean."""

    density: float  # fraction kept

    paper = "Sattler et al. 2019, Sparse binary compression: towards distributed deep learning"
    examples = ("sbc(0.01)", "sbc(0.3)", "sbc(1.0)")

    leaves = Kind.NOTHING
    parts = ("indices", "mean")

    def __post_init__(self) -> None:
        check_density("sbc", self.density)

    def choose(
        self, x: Tensor, key: Key, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        k = num_kept(self.density, x.numel())
        indices, values = extremes(x, k, k)
        if not is_finite(values):
            return indices, values
        sides = []
        for sign in (1, -1):
            own = sign * values > 0
            side = indices[own], values[own]
            if len(side[0]) < k:
                at, found = largest(sign * x, k)
                side = at, sign * found
            sides.append(side)
        # Means at the scale of the largest element: sums of large float64 would overflow.
        means = [float(in_range(side)[0].sum(dtype=torch.float64)) for _, side in sides]
        units = [in_range(side)[1] for _, side in sides]
        return sides[-means[1] * (units[1] / units[0]) > means[0]]

    def make_parts(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        scaled, unit = in_range(values)
        mean = scaled.sum(dtype=torch.float64) / max(1, len(values)) * unit
        return {
            "indices": encode_indices(indices, numel),
            "mean": clamp_to(mean, scale_dtype(values.dtype)).reshape(1),
        }

    def decode_values(self, parts: Parts, values: Tensor) -> Tensor:
        return clamp_to(parts["mean"], values.dtype).expand(len(values))

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        k = num_kept(self.density, spec.numel)
        mean = expect(parts["mean"], "mean", 1, scale_dtype(spec.dtype))
        if not bool(torch.isfinite(mean).all()):
            raise WireError("mean: not finite")
        expect(parts["indices"], "indices", parts["indices"].numel(), torch.uint8)
        indices = decode_indices(parts["indices"], spec.numel, k)
        return scatter(clamp_to(mean, spec.dtype).expand(k), indices, spec)
