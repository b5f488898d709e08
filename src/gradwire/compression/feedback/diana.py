"""DIANA: quantise the difference between gradient and a learned shift (Mishchenko et al. 2019).

Every worker learns a shift h_i, which approaches its gradient at the optimum. It quantises the
difference between its gradient and the shift:

    q_i <- Q(grad_i - h_i);   result <- h + mean of q_i;
    h_i <- h_i + alpha q_i;   h <- h + alpha mean of q_i        (h is the mean of all h_i)

for an unbiased Q of relative variance omega, with alpha <= 1/(1 + omega); all begin at zero. Then

    E|h_i + alpha Q(g - h_i) - g|^2 <= (1 - 2 alpha + alpha^2 (1 + omega)) |h_i - g|^2,

which is at most 1 - alpha times the squared distance before: shifts follow gradients that converge.
At the optimum the mean of the gradients is zero, but a worker's own gradient is not; quantising it
directly would add noise in every step. The differences go to zero, and the quantisation noise with
them. `alpha` is 1/(1 + omega) of the codec, if it states its omega. Momentum is left to the
optimizer.

Where we differ: the paper quantises blocks; here Q is any unbiased codec. There is no server: every
worker receives the mean of q_i and keeps h itself. This is correct only if it receives the exact
mean of the decoded messages, so payloads that cannot be added are always gathered, whatever route
the architecture prefers (see `ef21`).

Use it as `diana(qsgd(bits=2))` with exact gradients or large batches, where plain `qsgd` stalls
before the optimum because workers hold different data. For biased codecs (`topk`, `sign`) take
`ef21` or `ef`. Where the noise of small batches dominates, plain `qsgd` is as good and keeps no
vectors (DIANA keeps two).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Feedback,
    advance,
    advance_own,
    as_dtype,
    check_means,
    difference,
    on_gather_route,
)
from gradwire.core.codec import Codec, State
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.memory import MeanOf, Role, Roles
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Diana(Feedback):
    """Quantise the difference between the gradient and a shift learned from past messages."""

    inner: Codec | Reducer
    alpha: float | None = None  # how fast the shifts learn; 1/(1 + omega) of the codec if None

    paper = (
        "Mishchenko et al. 2019, Distributed learning with compressed gradient differences (DIANA)"
    )
    examples = (
        "diana(qsgd(bits=4))",
        "diana(terngrad(0.0), alpha=0.1)",
        "diana(randomk(0.25, unbiased=True))",
    )
    memory: ClassVar[Roles] = {"own": Role.OWN, "common": MeanOf("own")}

    def __post_init__(self) -> None:
        check_means(self, self.inner)
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise ValueError(
                f"diana: alpha lies in 0 .. 1, without 0, got {self.alpha}. "
                "Leave it out for 1/(1 + omega) of the codec."
            )

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        return (
            "after"  # no residual: the result is an unbiased estimate of the current mean gradient
        )

    def init(self, spec: Spec, size: int) -> State:
        inner = lift(self.inner).init(spec, size)
        self._alpha(spec)  # complains if there is none
        return {"tensors": spec.layout, "own": None, "common": None, "inner": inner}

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        self.refuse_residual(residual)
        node = group.node
        # For this step: the codec may change with time.
        alpha = self._alpha(replace(Spec.of(x), tensors=state["tensors"]))
        new = await node.call(difference, self, x, state["own"])
        reduced = await lift(self.inner).mean(new, state["inner"], key, on_gather_route(group))
        own = await node.call(advance_own, state["own"], reduced, alpha)
        common = await node.share(advance, state["common"], reduced.mean, alpha)
        return Reduced(
            await node.share(_add_shift, state["common"], reduced.mean),
            partial(_own, state["own"], reduced),
            {**state, "own": own, "common": common, "inner": reduced.state},
        )

    def _alpha(self, spec: Spec) -> float:
        guarantee = self.inner.guarantee(spec) if isinstance(self.inner, Codec) else None
        omega = None if guarantee is None else guarantee.omega
        if guarantee is not None and omega is None and guarantee.delta is not None:
            raise ValueError(
                f"{self!r}: {self.inner!r} is biased, so the shifts would learn wrong gradients. "
                f"Write ef21({self.inner!r}), or take an unbiased codec such as qsgd(bits=4)."
            )
        if self.alpha is not None:
            return float(self.alpha)
        if omega is None:
            raise ValueError(
                f"{self!r}: {self.inner!r} states no relative variance omega from which alpha "
                f"would follow. Give it: diana({self.inner!r}, alpha=0.1)."
            )
        return 1 / (1 + omega)


def _add_shift(shift: Tensor | None, mean: Tensor) -> Tensor:
    return as_dtype(advance(shift, mean), mean.dtype)


def _own(shift: Tensor | None, reduced: Reduced) -> Tensor:
    return _add_shift(shift, reduced.own())
