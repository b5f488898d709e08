"""Variance-based sparsification (Tsuzuku et al. 2018, "Variance-based gradient compression ...").

An element waits until its accumulated gradient stands out from its noise:
r_i <- r_i + g_i;   v_i <- v_i + sum_z (grad_i f_z / B)^2;
if r_i^2 > alpha v_i: send r_i, r_i <- 0, v_i <- 0;   else v_i <- zeta v_i.
How many pass is up to the data: little at the end of training, where gradients are mostly noise.

We differ in v. Gradients of single samples z are not visible here, so a step's gradient counts as
one sample: v_i <- v_i + g_i^2. An element whose gradients agree in sign and size then has
r^2 / v = T after T steps: alpha = 1.5 sends it every other step, while one of changing signs waits.
With alpha below 1 a single step suffices, and everything is sent.
r is the input under `ef`; the state holds the residual left in the step before, which gives g, and
v. Where it holds neither (an inner stage of a chain), g is the input and v = g^2. The paper's 4-bit
values are a matter of the next stage: `variance(1.5) >> qsgd(bits=4)`.

It needs `ef(...)`, for what it sends is a sum over steps: of a single step it sends nothing, or
all with alpha below 1.

Use it as `ef(variance(1.5))` where gradients are noisy and the traffic need not be fixed: elements
whose signs agree from step to step are sent, the others wait. Where the rate must be known
beforehand take `ef(topk(0.01))`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compression.sparsification._families import Selection
from gradwire.compression.sparsification._selection import matching_memory
from gradwire.core.codec import Parts, State, Traits, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Variance(Selection):
    """Send an element once its accumulated gradient stands out from its noise. Needs ef."""

    alpha: float  # how far: the square must exceed alpha times the variance
    zeta: float = 0.999  # decay of the variance of what waits

    paper = (
        "Tsuzuku et al. 2018, Variance-based gradient compression for efficient distributed deep "
        "learning"
    )
    examples = ("variance(1.5)", "variance(0.5)", "variance(2.0, zeta=0.9)")

    traits = Traits(selects=True, needs_feedback=True)

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ValueError(
                f"variance: alpha must be positive and finite, got {self.alpha}. The paper takes "
                "1 to 2; more sends less."
            )
        if not 0 < self.zeta <= 1:
            raise ValueError(
                f"variance: zeta is a decay and must lie in (0, 1], got {self.zeta}. "
                "The paper takes 0.999."
            )

    def init(self, spec: Spec) -> State:
        return {
            "residual": torch.zeros(spec.numel, dtype=spec.dtype),
            # The square root of v: squares of gradients leave the range of float32 early.
            "deviation": torch.zeros(spec.numel, dtype=scale_dtype(spec.dtype)),
        }

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        residual = matching_memory(state["residual"], x) if state else None
        total = x.to(scale_dtype(x.dtype))
        deviation = total.abs()
        if residual is not None:
            latest = total - residual.to(total.dtype)
            deviation = torch.hypot(state["deviation"].to(x.device), latest)
        sent = (total.abs() > math.sqrt(self.alpha) * deviation) & (x != 0)
        if residual is not None:
            state = {
                "residual": x.masked_fill(sent, 0.0),
                "deviation": deviation.masked_fill(sent, 0.0) * math.sqrt(self.zeta),
            }
        where = sent.nonzero().reshape(-1)
        return self.make_parts(where, x[where], x.numel()), state
