"""ECQ-SGD: error feedback that is scaled down and forgotten (Wu et al. 2018).

    h_t <- beta h_{t-1} + g_{t-1} - g~_{t-1};   send g~_t = Q(g_t + alpha h_t);   h_0 = 0.

h accumulates the difference between the gradients g and the messages g~, with weights that decay by
beta per step; alpha is the share of h that enters the next message. `ecq(inner, 1.0, 1.0)` is
`ef(inner)`. With p = g_t + alpha h_t and the codec's error e = p - Q(p), the same rule reads

    h_{t+1} = e + (beta - alpha) h_t,

which is how it is computed: fused kernels give e. Smaller alpha and beta damp the noise that an
unbiased quantiser of large variance would otherwise feed back into itself. The price: what h
forgets is lost, so applied updates and residuals no longer add up to the gradients.

Where we differ: the paper's Q rounds at random to levels at equal distances, as QSGD does; here it
is any codec or chain.

Use it as `ecq(qsgd(1), alpha=0.2, beta=0.9)` around coarse unbiased quantisers (`terngrad`, `qsgd`
with few levels), where `ef` may diverge. Around contractions (`topk`, `sign`) take `ef`, which
loses nothing. It holds one more vector of the gradient's size per worker.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.compression.feedback._wrapping import Forward, Result, SenderFeedback, check_inner
from gradwire.core.codec import Codec, State, corrected
from gradwire.core.lifted import lift
from gradwire.core.memory import Role, Roles
from gradwire.core.node import Node
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class ECQ(SenderFeedback):
    """Error feedback with a weight on the fed-back error and a decay of the accumulated one."""

    inner: Codec | Reducer
    alpha: float  # share of the accumulated error that enters the next message
    beta: float  # decay of the accumulated error per step

    paper = (
        "Wu et al. 2018, Error compensated quantized SGD and its applications to large-scale "
        "distributed optimization"
    )
    examples = (
        "ecq(qsgd(1), alpha=0.2, beta=0.9)",
        "ecq(terngrad, alpha=0.1, beta=0.5)",
        "ecq(topk(0.1), alpha=1.0, beta=1.0)",
    )
    memory: ClassVar[Roles] = {"residual": Role.LEFT}

    def __post_init__(self) -> None:
        check_inner(self, self.inner)
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 <= value <= 1:
                raise ValueError(
                    f"ecq: {name} lies in 0 .. 1, got {value}. Try alpha=0.2, beta=0.9; "
                    "both 1 is ef, alpha 0 feeds nothing back."
                )

    def init(self, spec: Spec, size: int) -> State:
        missing = torch.zeros(spec.shape, dtype=spec.dtype)
        return {"residual": missing, "inner": lift(self.inner).init(spec, size)}

    async def exchange(
        self, x: Tensor, state: State, node: Node, size: int, forward: Forward[Result]
    ) -> Result:
        missing = state["residual"]
        fed = missing if self.alpha == 1 else await node.call(torch.mul, missing, self.alpha)
        result = await forward(x, state["inner"], fed)
        assert result.residual is not None
        kept = await node.call(_update_missing, result.residual, missing, self.beta - self.alpha)
        return result.keeping({"residual": kept, "inner": result.state})


def _update_missing(lost: Tensor, missing: Tensor, weight: float) -> Tensor:
    return lost if weight == 0 else corrected(lost, weight * missing.to(lost.device))
