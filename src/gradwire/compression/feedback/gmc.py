"""Global momentum compression: momentum of the applied updates (Zhao, Xie and Li 2019).

Momentum SGD moves along the mean gradient plus m times the last update. Every worker has applied
that update and so knows it. Each adds it to its own gradient before compression with error
feedback, and the mean over the workers preserves it:

    p <- g + m d + e;   send C(p);   e <- p - C(p);   d <- mean of C(p), which is applied.

So d is the global momentum, sparse as the messages are, whereas `dgc` accumulates the momentum of
each worker's own gradients; the two differ if the workers' data differ. With density 1 it is SGD
with momentum m.

Where we differ: d is the last mean, not the last change of the parameters over the learning rate;
they are the same as long as the rate is. The paper sparsifies, here C is any codec or chain. Its
extension GMC+ is not here.

Use it as `gmc(topk(0.01))` with an optimizer `sgd` without momentum, where the workers' data
differ; with very little sent `dgc` has its warm-up. It holds one more vector of the gradient's size
per worker, and one that all share.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Forward,
    Result,
    SenderFeedback,
    as_dtype,
    check_inner,
    warn_unless_contracts,
)
from gradwire.core.codec import Codec, State, check_input, scale_dtype
from gradwire.core.lifted import lift
from gradwire.core.memory import Role, Roles
from gradwire.core.node import Node
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class GMC(SenderFeedback):
    """Add the momentum of the last applied update to each worker's gradient before compression."""

    inner: Codec | Reducer
    momentum: float = 0.9  # weight of the last update

    paper = (
        "Zhao, Xie and Li 2019, Global momentum compression for sparse communication in "
        "distributed learning"
    )
    examples = (
        "gmc(topk(0.01))",
        "gmc(topk(0.1) >> qsgd(bits=4), momentum=0.5)",
        "gmc(randomk(0.1))",
        "gmc(sign)",
    )
    memory: ClassVar[Roles] = {"residual": Role.LEFT, "last": Role.COMMON}

    def __post_init__(self) -> None:
        check_inner(self, self.inner)
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"gmc: momentum lies in 0 .. 1, without 1, got {self.momentum}. Try 0.9."
            )

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        return "inside"

    @property
    def heavy_ball(self) -> tuple[float, bool]:
        return self.momentum, False

    def init(self, spec: Spec, size: int) -> State:
        warn_unless_contracts(self, self.inner, spec, "more levels or less momentum")
        return {
            "residual": torch.zeros(spec.shape, dtype=spec.dtype),
            "last": None,  # d
            "inner": lift(self.inner).init(spec, size),
        }

    async def exchange(
        self, x: Tensor, state: State, node: Node, size: int, forward: Forward[Result]
    ) -> Result:
        step = await node.call(_add_momentum, self, x, state["last"])
        result = await forward(step, state["inner"], state["residual"])
        # A worker that pushes does not know the applied mean: it uses its own step instead.
        last = result.mean if isinstance(result, Reduced) else step
        kept = {"residual": result.residual, "last": last, "inner": result.state}
        return result.keeping(kept)


def _add_momentum(method: GMC, x: Tensor, last: Tensor | None) -> Tensor:
    x = x.detach()
    check_input(method, x)  # here, because saturating would hide infinities
    if last is None:
        return x
    wide = scale_dtype(x.dtype)
    return as_dtype(x.to(wide) + last.to(x.device, wide) * method.momentum, x.dtype)
