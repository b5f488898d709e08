"""1-bit Adam: Adam whose variance is frozen after a warm-up, so that momentum can be compressed.

Tang et al. 2021, Alg. 1. For the first `warmup` steps gradients are averaged as they are:

    m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2      (g the mean gradient)

Then v is frozen, and the momentum is compressed with error feedback by the workers and, on the
scatter route, by the owners of shards, which act as the paper's server:

    worker i:   p_i <- beta1 m + (1 - beta1) g_i + e_i;   send C(p_i);   e_i <- p_i - C(p_i)
    all:        m <- mean of what was sent

Error feedback needs updates that are linear in what is sent. Adam's are not, because of v; those
with a frozen v are. The result is the direction m / (sqrt(v) + eps), not a mean of gradients: apply
it with plain `sgd(lr)`, with the learning rate that Adam would have.

Where we differ: the paper writes Adam without the correction of the bias towards zero. Here both
moments are corrected as in Kingma and Ba 2015, m by its own age and v by that at which it was
frozen, so the warm-up is Adam itself, number by number, and `onebit_adam(identity, ...)` is Adam
with a frozen variance. A dropped step counts as a step.

Elements whose frozen variance is zero had no gradient in the whole warm-up (or one so small that
its square is zero). Dividing their decoded momentum by eps would make huge steps, so these elements
are not updated. The same may happen, to a lesser degree, wherever sqrt(v) is far below the typical
momentum that `sign` gives to every element. `floor` bounds this: sqrt(v) counts as at least `floor`
times its root mean square over the bucket, once it is frozen. Without it (0, as in the paper) Adam
stays Adam.

Use it as `onebit_adam(sign, warmup=100)` where Adam trains and SGD does not. The warm-up is sent
uncompressed, so its length determines the savings; the variance must be stable by its end. It holds
three vectors of the gradient's size per worker, of which two are Adam's own.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Feedback,
    as_dtype,
    check_inner,
    difference,
    warn_unless_contracts,
)
from gradwire.core.codec import Codec, State, clamp_to, scale_dtype
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.memory import Role, Roles
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class OneBitAdam(Feedback):
    """Adam with a variance frozen after a warm-up, and compressed momentum from then on."""

    inner: Codec | Reducer
    warmup: int  # steps that are sent uncompressed, in which the variance is learned
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    floor: float = 0.0  # least sqrt of the frozen variance, in units of its root mean square

    paper = (
        "Tang et al. 2021, 1-bit Adam: Communication efficient large-scale training with Adam's "
        "convergence speed"
    )
    examples = (
        "onebit_adam(sign, warmup=100)",
        "onebit_adam(sign(bucket=64), warmup=1, floor=0.1)",
        "onebit_adam(topk(0.1), warmup=1)",
    )
    memory: ClassVar[Roles] = {
        "residual": Role.LEFT,
        "momentum": Role.COMMON,
        "variance": Role.COMMON,
    }

    def __post_init__(self) -> None:
        check_inner(self, self.inner)
        if self.warmup < 1:
            raise ValueError(
                f"onebit_adam: warmup is the number of steps in which the variance is learned, at "
                f"least 1, got {self.warmup}. A fifth of all steps is a good beginning."
            )
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"onebit_adam: {name} lies in 0 .. 1, without 1, got {beta}")
        if not self.eps > 0:
            raise ValueError(f"onebit_adam: eps must be above 0, got {self.eps}. Adam's is 1e-8.")
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"onebit_adam: floor lies in 0 .. 1, got {self.floor}. Try 0.1, or 0 for none."
            )

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        return "inside"

    def init(self, spec: Spec, size: int) -> State:
        warn_unless_contracts(self, self.inner, spec, "sign or topk(...)")
        return {
            "residual": torch.zeros(spec.shape, dtype=spec.dtype),  # e_i
            "momentum": None,  # m
            "variance": None,  # v
            "inner": lift(self.inner).init(spec, size),
        }

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        self.refuse_residual(residual)
        if key.step < self.warmup:
            return await self._warmup_mean(x, state, key.step + 1, group)
        node, variance = group.node, state["variance"]
        if variance is None:
            raise ValueError(
                f"{self!r} has no variance in step {key.step}: it learns it in the first "
                f"{self.warmup} steps and must be there from the beginning. Load its state too."
            )
        own = await node.call(_momentum_to_send, self, x, state["momentum"], variance)
        reduced = await lift(self.inner).mean(own, state["inner"], key, group, state["residual"])
        momentum, direction = await node.share(
            _frozen_step, self, reduced.mean, variance, key.step + 1
        )
        state = {
            "residual": reduced.residual,
            "momentum": momentum,
            "variance": variance,
            "inner": reduced.state,
        }
        return Reduced(direction, reduced.own, state)

    async def _warmup_mean(self, x: Tensor, state: State, age: int, group: Group) -> Reduced:
        """A step of Adam on the mean of the gradients, which are sent as they are."""
        node = group.node
        x = await node.call(difference, self, x, None)
        mean = (await group.mean(x.reshape(-1))).reshape(x.shape)
        momentum, variance, direction = await node.share(
            _update_moments, self, mean, state["momentum"], state["variance"], age
        )
        state = {**state, "momentum": momentum, "variance": variance}
        return Reduced(direction, partial(_identity, x), state)


def _update_moments(
    method: OneBitAdam, mean: Tensor, momentum: Tensor | None, variance: Tensor | None, age: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Both moments, with the mean gradient in them, and the direction."""
    wide = mean.to(scale_dtype(mean.dtype))
    past = torch.zeros_like(wide) if variance is None else variance.to(wide.device)
    # Rounded as torch.optim does it.
    variance = (past * method.beta2).addcmul_(wide, wide, value=1 - method.beta2)
    momentum = _blend_gradient(method, wide, momentum)
    return momentum, variance, _direction(method, momentum, variance, age, mean.dtype)


def _momentum_to_send(
    method: OneBitAdam, x: Tensor, momentum: Tensor | None, variance: Tensor
) -> Tensor:
    """The common momentum updated with this worker's gradient, as it is sent."""
    gradient = difference(method, x, None).to(scale_dtype(x.dtype))
    return as_dtype(
        _zero_where_unknown(_blend_gradient(method, gradient, momentum), variance), x.dtype
    )


def _blend_gradient(method: OneBitAdam, gradient: Tensor, momentum: Tensor | None) -> Tensor:
    past = torch.zeros_like(gradient) if momentum is None else momentum.to(gradient.device)
    return torch.lerp(past, gradient, 1 - method.beta1)


def _zero_where_unknown(momentum: Tensor, variance: Tensor) -> Tensor:
    """The momentum, but zero where the frozen variance is."""
    return momentum.masked_fill(variance.to(momentum.device) == 0, 0)


def _frozen_step(
    method: OneBitAdam, mean: Tensor, variance: Tensor, age: int
) -> tuple[Tensor, Tensor]:
    """The new momentum, from what was received, and the direction."""
    momentum = _zero_where_unknown(mean.to(scale_dtype(mean.dtype)), variance)
    return momentum, _direction(method, momentum, variance, age, mean.dtype)


def _direction(
    method: OneBitAdam, momentum: Tensor, variance: Tensor, age: int, dtype: torch.dtype
) -> Tensor:
    """m_hat / (sqrt(v_hat) + eps)   (Kingma and Ba 2015, Alg. 1)."""
    variance = variance.to(momentum.device)
    scale = variance.sqrt()
    if method.floor and age > method.warmup and variance.numel():
        scale.clamp_(min=method.floor * variance.mean().sqrt())
    scale.div_((1 - method.beta2 ** min(age, method.warmup)) ** 0.5).add_(method.eps)
    return clamp_to((momentum / scale).div_(1 - method.beta1**age), dtype)


def _identity(x: Tensor) -> Tensor:
    return x
