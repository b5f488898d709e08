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

from torch import Tensor

from gradwire.compression.sparsification._selection import SignedSelection
from gradwire.core.codec import Parts, State, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Threshold(SignedSelection):
    """Send plus or minus tau for elements beyond it: a position and one bit each. Needs ef."""

    tau: float  # in units of the gradient

    paper = "Strom 2015, Scalable distributed DNN training using commodity GPU cloud computing"
    examples = ("threshold(0.5)", "threshold(1e-6)", "threshold(100.0)")

    parts = ("indices", "values")

    def __post_init__(self) -> None:
        if not (self.tau > 0 and math.isfinite(self.tau)):
            raise ValueError(
                f"threshold: tau must be positive and finite, got {self.tau}. It is in units of "
                "the gradient; try a few times its standard deviation."
            )

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        beyond = x.to(scale_dtype(x.dtype)).abs() > self.tau
        return self.signed(x, beyond.nonzero().reshape(-1)), state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return self.placed(parts, spec, self.tau, self.tau)
