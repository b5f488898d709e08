"""DeMo: each worker keeps its own momentum and shares only its fast components.

Decoupled momentum (Peng, Quesnelle and Kingma 2024, Alg. 1):

    m_i <- beta m_i + g_i;   q_i <- C(m_i);   m_i <- m_i - q_i;   all step along sign(mean of q_i)

Momenta are never synchronized: a component that the codec does not select stays with its worker and
grows until it is selected. With beta = 1 this is error feedback; a smaller beta forgets, so applied
updates and momenta do not add up to the sum of all gradients. A codec that sends everything empties
m in each step, and what remains is plain SGD, not SGD with momentum.

The paper's C is the top-k of a cosine transform of each chunk, `dctk`; here it is any codec, chain
or reducer.

`signed` (the paper's way) makes every element of the model move by the learning rate, or not at all
where the mean is exactly zero. So the magnitude of gradients does not matter: the learning rate is
that of Adam (1e-4 to 3e-3), not that of SGD, and must fall towards the end (`schedule="cosine"`),
because steps do not get shorter near a minimum. Without it (`signed=False`) the mean is the step,
for a learning rate like that of `ef`.

Where we differ: the authors' code multiplies g_i by the learning rate before it enters m_i, which
the sign undoes unless the rate changes fast. It also divides the sum of a coefficient by the number
of workers that sent it; here it is the mean over all, in which the choice of few counts less.
Codecs that are not `dctk` may take the scatter route, where a mean is encoded again. Weight decay
is added to each gradient, as for all methods with a momentum, not to the step.

Use it as `demo(dctk(64, 8))` with a plain `sgd(0.001)` for networks of large matrices, above all
transformers. Where the optimizer is tuned SGD with momentum take `dgc`; where elements of a layer
have no neighbourhood for a transform to use, `demo(topk(0.01))`. It holds one vector of the
gradient's size per worker.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Feedback,
    as_dtype,
    check_inner,
    warn_unless_contracts,
)
from gradwire.core.codec import Codec, State, check_input, scale_dtype
from gradwire.core.group import Group, is_half
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.memory import Role, Roles
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class DeMo(Feedback):
    """Keep a momentum per worker, share its largest components, and step along their sign."""

    inner: Codec | Reducer
    beta: float = 0.999  # decay of the momentum per step
    signed: bool = True  # step along the sign of the mean, not along the mean

    paper = "Peng, Quesnelle and Kingma 2024, DeMo: Decoupled momentum optimization"
    examples = (
        "demo(dctk(64, 8))",
        "demo(dctk(8, k=2) >> fp16, beta=0.9, signed=False)",
        "demo(topk(0.1), beta=0.99)",
    )
    memory: ClassVar[Roles] = {"momentum": Role.LEFT}

    def __post_init__(self) -> None:
        check_inner(self, self.inner)
        if not 0 <= self.beta <= 1:
            raise ValueError(f"demo: beta lies in 0 .. 1, got {self.beta}. The paper's is 0.999.")

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        return "inside"

    def init(self, spec: Spec, size: int) -> State:
        warn_unless_contracts(self, self.inner, spec, "dctk(...) or topk(...)")
        momentum = torch.zeros(spec.shape, dtype=scale_dtype(spec.dtype))
        return {"momentum": momentum, "inner": lift(self.inner).init(spec, size)}

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        self.refuse_residual(residual)
        node, inner = group.node, lift(self.inner)
        past = await node.call(torch.mul, state["momentum"], self.beta)
        if is_half(x):  # 0.999 m would be m again
            momentum = await node.call(_accumulate, self, x, past)
            whole, none = await node.call(_as_sent, momentum, x.dtype)
            reduced = await inner.mean(whole, state["inner"], key, group, none)
            kept = await node.call(_remaining_momentum, momentum, reduced)
        else:
            # What is lost of g + beta m is m less what was sent of it: the momentum that stays.
            reduced = await inner.mean(x, state["inner"], key, group, past)
            assert reduced.residual is not None
            kept = reduced.residual
        mean = await node.share(torch.sign, reduced.mean) if self.signed else reduced.mean
        return Reduced(mean, reduced.own, {"momentum": kept, "inner": reduced.state})


def _accumulate(method: DeMo, x: Tensor, past: Tensor) -> Tensor:
    check_input(method, x)
    return past.to(x.device) + x.detach()


def _as_sent(momentum: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The vector to send, and the zero residual that some codecs need."""
    whole = as_dtype(momentum, dtype)
    return whole, torch.zeros_like(whole)


def _remaining_momentum(momentum: Tensor, reduced: Reduced) -> Tensor:
    return momentum - reduced.own()
