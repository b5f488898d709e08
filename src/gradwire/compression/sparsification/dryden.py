"""Fixed proportion per sign (Dryden et al. 2016, "Communication quantization ...").

Of the positive elements the largest fraction `density` is sent, of the negative ones likewise; the
two thresholds differ. Each element sent is replaced by the mean of those sent of its sign, so it
takes a position and one bit, and two means are sent in all. The rest stays in the residual (`ef`).

The k largest are found exactly, where Dryden et al. also allow for a sampled threshold. At least
one element of each sign is sent if there is one. On each side it is what `stc` does on all, so it
is a contraction: delta = min(2/3 density, 1/k), k = density d; the 2/3 are for rounding
the number kept of each side.

Use it as `ef(dryden(0.01))` for about a tenth of a bit per element or less where the positive and
the negative elements differ in size, so that each side wants its own mean. Otherwise
`ef(stc(0.01))` does the same with one; for better values take `topk(0.01) >> qsgd(bits=4)`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._families import Selector, SignedSelection
from gradwire.compression.sparsification._selection import (
    check_density,
    extremes,
    mean_magnitude,
    num_kept,
)
from gradwire.core.codec import Guarantee, Parts, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Dryden(SignedSelection, Selector):
    """Keep a fraction of the positive and of the negative elements, each side as its mean."""

    density: float  # fraction kept of the positive and of the negative elements

    paper = (
        "Dryden et al. 2016, Communication quantization for data-parallel training of deep "
        "neural networks"
    )
    examples = ("dryden(0.01)", "dryden(0.3)", "dryden(1.0)")

    parts = ("indices", "scale", "values")

    def __post_init__(self) -> None:
        check_density("dryden", self.density)

    def guarantee(self, spec: Spec) -> Guarantee:
        # As for `stc`, on each side: of n elements at least 2/3 of the density is kept, which is
        # where rounding to a whole number does most harm (1 of 1.5).
        most = num_kept(self.density, max(1, spec.numel))
        return Guarantee(delta=min(2 / 3 * self.density, 1 / most))

    def choose(
        self, x: Tensor, key: Key, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        tails = kernels.tails(x, 0.0)
        high, low = (num_kept(self.density, n) for n in (tails.num_above, tails.num_below))
        return extremes(x, high, low)

    def make_parts(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        high, low = values[values > 0], values[values < 0]
        scale = torch.cat([mean_magnitude(side, len(side)) for side in (high, low)])
        return {**super().make_parts(indices, values, numel), "scale": scale}

    def means(self, parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        positive, negative = expect_scale(parts["scale"], 2, scale_dtype(dtype))
        return positive, negative
