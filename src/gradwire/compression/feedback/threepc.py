"""3PC, compressed and lazy (CLAG): speak only if there is news (Richtarik et al. 2022).

A three-point compressor C_{h,y}(x) sends x to those who hold h, given that x was y before, with

    E|C_{h,y}(x) - x|^2 <= (1 - A) |h - y|^2 + B |x - y|^2,   0 < A <= 1,   B >= 0.

Here x is a worker's gradient, y its last one and h what all know of it. The one built here:

    C_{h,y}(x) = h + C(x - h)   if |x - h|^2 > zeta |x - y|^2,   else h

for a contraction C, which has A = 1 - (1 - delta)(1 + s), B = max((1 - delta)(1 + 1/s), zeta) for
any s > 0 with (1 - delta)(1 + s) < 1. A worker of whom the others know enough, measured by how far
its gradient moved since the last step, sends one byte, "as before". As in `ef21`, all hold the mean
of what they know of each. With zeta = 0 it is `ef21` (but C(0) is one byte), with `identity` it
is lazy aggregation (LAG). The other members of the family are not here. The first step sends.

Where we differ: nobody collects, so payloads are gathered always, also those that could be added on
the way (a sum needs everyone), whatever route the architecture prefers.

Use it as `threepc(topk(0.1), zeta=1.0)` with exact gradients or large batches, where some workers'
gradients change little between steps. With noisy ones x - y is mostly noise, and lazy steps
are steps along old gradients: take `ef21` with momentum, or `ef`. It holds three more vectors of
the gradient's size per worker.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gradwire.compression.feedback._wrapping import (
    Feedback,
    advanced,
    as_dtype,
    check_heard,
    difference,
    warn_unless_settles,
)
from gradwire.core.codec import Codec, State, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.group import Group, mean_in_order
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec

_AS_BEFORE = 0  # the one byte of a worker that has no news; every payload is longer


@dataclass(frozen=True, repr=False)
class ThreePC(Feedback):
    """Send the difference to what all know, or one byte if it is small against the last change."""

    inner: Codec
    zeta: float  # how lazy: 0 always sends

    paper = (
        "Richtarik et al. 2022, 3PC: Three point compressors for communication-efficient "
        "distributed training and a better theory for lazy aggregation"
    )
    examples = (
        "threepc(topk(0.1), zeta=1.0)",
        "threepc(identity, zeta=4.0)",
        "threepc(sign, zeta=0.0)",
    )

    def __post_init__(self) -> None:
        check_heard(self, self.inner)
        if self.inner.shares:
            raise ValueError(
                f"threepc({self.inner!r}): the codec needs a maximum over all workers in every "
                "step, but some have nothing to say. Write ef21 instead of threepc."
            )
        if not 0 <= self.zeta < math.inf:
            raise ValueError(
                f"threepc: zeta must be finite and not negative, got {self.zeta}. "
                "Try 1.0; 0 sends in every step, larger is lazier."
            )

    def init(self, spec: Spec, size: int) -> State:
        warn_unless_settles(self, self.inner, spec)
        return {
            "last": None,  # y
            "own": None,  # h
            "common": None,  # the mean of all h
            "tensors": spec.layout,
            "inner": self.inner.init(spec),
        }

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        self.refuse_residual(residual)
        node, codec = group.node, self.inner
        spec = replace(Spec.of(x), tensors=state["tensors"])
        new, has_news = await node.call(_news, self, x, state)
        own, inner = state["own"], state["inner"]
        message = torch.full((1,), _AS_BEFORE, dtype=torch.uint8, device=x.device)
        if has_news:
            payload, inner = await node.call(codec.encode, new, inner, key)
            own = await node.call(_heard, own, codec, payload, spec, key)
            message = payload.buffer
        buffers = tuple(await group.all_gather(message))
        heard = await node.share(_mean, codec, spec, key.shared(), buffers)
        common = await node.share(advanced, state["common"], heard)
        return Reduced(
            await node.share(as_dtype, common, x.dtype),
            partial(_known, own, x),
            # A copy: whoever gave x may write the next gradient over it.
            {**state, "last": x.detach().clone(), "own": own, "common": common, "inner": inner},
        )


def _news(method: ThreePC, x: Tensor, state: State) -> tuple[Tensor, bool]:
    """x - h, and whether it is to be sent."""
    new = difference(method, x, state["own"])
    if state["last"] is None:
        return new, True
    change = difference(method, x, state["last"].to(scale_dtype(x.dtype)))
    return new, _square(new) > method.zeta * _square(change)


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _heard(own: Tensor | None, codec: Codec, payload: Payload, spec: Spec, key: Key) -> Tensor:
    return advanced(own, codec.decode(payload, spec, key))


def _known(own: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if own is None else as_dtype(own, x.dtype)


def _mean(codec: Codec, spec: Spec, key: Key, buffers: tuple[Tensor, ...]) -> Tensor:
    """The mean of all messages, of which those of one byte are zero."""
    device = buffers[0].device
    decoded = []
    for rank, buffer in enumerate(buffers):
        if buffer.numel() != 1:
            decoded.append(codec.decode(codec.unpack(buffer, spec), spec, key.private(rank)))
        elif int(buffer[0]) != _AS_BEFORE:
            raise WireError(f"rank {rank} sent the byte {int(buffer[0])}, expected {_AS_BEFORE}")
    if not decoded:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return mean_in_order(decoded, len(buffers))
