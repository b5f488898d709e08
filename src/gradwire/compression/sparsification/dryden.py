"""Fixed proportion per sign (Dryden et al. 2016, "Communication quantization ...").

Of the positive elements the largest fraction `density` is sent, of the negative ones likewise; the
two thresholds differ. Each element sent is replaced by the mean of those sent of its sign, so it
takes a position and one bit, and two means are sent in all. The rest stays in the residual (`ef`).

The k largest are found exactly, where Dryden et al. also allow for a sampled threshold. At least
one element of each sign is sent if there is one.

Use it as `ef(dryden(0.01))` for about a tenth of a bit per element or less where the positive and
the negative elements differ in size, so that each side wants its own mean. Otherwise
`ef(stc(0.01))` does the same with one; for better values take `topk(0.01) >> qsgd(bits=4)`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compression.sparsification._selection import (
    SignedSelection,
    check_density,
    largest,
    num_kept,
)
from gradwire.core.codec import Parts, State, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Dryden(SignedSelection):
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

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        sides, means = [], []
        for side in (x, -x):
            k = num_kept(self.density, int((side > 0).sum()))
            indices = largest(side, k)
            sides.append(indices)
            means.append(side[indices].sum(dtype=torch.float64) / max(1, k))
        scale = torch.stack(means).to(scale_dtype(x.dtype))  # [2]: positive, negative
        return {**self.signed(x, torch.cat(sides).sort().values), "scale": scale}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        scale = expect_scale(parts["scale"], 2, scale_dtype(spec.dtype))
        return self.placed(parts, spec, scale[0], scale[1])
