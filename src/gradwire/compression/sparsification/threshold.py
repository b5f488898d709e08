"""Fixed threshold, one bit of value (Strom 2015, "Scalable distributed DNN training ...").

With the residual r (here the input, under `ef`): an element above tau sends +tau, one below -tau
sends -tau, the others send nothing; what was sent is subtracted from r. So an element of 3 tau
takes three steps to get through. How many are sent depends on the data.

Strom packs position and sign into one 32-bit word. Here positions are entropy-coded and the sign
takes one bit. A tensor where all of |x| is above tau costs two bits per element.

Use it as `ef(threshold(tau))` where the scale of the gradients is known and steady enough to tune
tau, since comparing is all the work there is. A tau that does not fit sends nearly nothing or
nearly everything; to fix the rate instead take `ef(stc(0.01))` or `ef(topk(0.01))`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compression.sparsification._families import Selector, SignedSelection
from gradwire.compression.sparsification._selection import reaching
from gradwire.core.codec import Parts
from gradwire.core.key import Key


@dataclass(frozen=True, repr=False)
class Threshold(SignedSelection, Selector):
    """Send plus or minus tau for elements beyond it: a position and one bit each. Needs ef."""

    tau: float  # in units of the gradient

    paper = "Strom 2015, Scalable distributed DNN training using commodity GPU cloud computing"
    # The first fits the saved gradients, of which it sends between 0.1% and 10%.
    examples = ("threshold(0.01)", "threshold(0.5)", "threshold(1e-6)", "threshold(100.0)")

    parts = ("indices", "values")
    adds_residual = True

    def __post_init__(self) -> None:
        if not (self.tau > 0 and math.isfinite(self.tau)):
            raise ValueError(
                f"threshold: tau must be positive and finite, got {self.tau}. It is in units of "
                "the gradient; try a few times its standard deviation."
            )

    def choose(
        self, x: Tensor, key: Key, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        tau = torch.tensor(self.tau, dtype=torch.float64).to(x.dtype)
        beyond = float(torch.nextafter(tau, torch.full_like(tau, math.inf)))
        return reaching(x, beyond, x.numel() // 16, residual, out)

    def means(self, parts: Parts, dtype: torch.dtype) -> tuple[float, float]:
        return self.tau, self.tau
