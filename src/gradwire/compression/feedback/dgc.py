"""Deep gradient compression: momentum before selection (Lin, Han, Mao, Wang and Dally 2018).

Every worker keeps a velocity u and the residual v, the velocities not sent yet:

    u <- m u + g;   v <- v + u;   send C(v);   v <- v - C(v),

and the mean of the decoded messages is applied without further momentum (sec. 3.2, momentum
correction). So a gradient that waits in the residual accumulates the momentum that it would have
had; momentum on sparse means would only start when an element is sent. With `nesterov` it is
v <- v + (g + m u).

- Momentum factor masking (sec. 3.3): u <- 0 where elements were sent, so that stale momentum does
  not move them on. It is on if C selects elements, else off; `masking=False` turns it off.
- Local gradient clipping (sec. 3.2): each of N workers cuts its share of a sum, g/N, to N^(-1/2) of
  the norm meant for the sum, if it is longer, before it is added to u. Here workers hold g and take
  means, so g is cut to norm clip N^(1/2): then N independent gradients have a mean of norm clip. It
  is the norm of what is averaged at once: the whole model, if the schedule has one bucket.
- Warm-up (sec. 3.3): `warmup=4` keeps 25%, 6.3%, 1.6%, 0.4% in the first four epochs and 0.1% from
  then on, if the density is 0.001: the density falls by equal factors, once per epoch. It is short
  for a ramp, `dgc(ramp(0.25, 0.001, epochs=4, hold=1))`.

With density 1 this is SGD with momentum m, and with masking plain SGD. The C of the paper is
`sampledk`, which is what a number means here, `dgc(0.001)`; any codec or chain may stand there.

Where we differ: an element counts as sent if `topk` or `sampledk` selected it, whatever a quantiser
behind makes of it; for other codecs if it is not decoded to zero.

Use it as `dgc(0.001, warmup=4)`, or `dgc(topk(0.001) >> qsgd(bits=4))`, with an optimizer `sgd`
without momentum, where very little is sent and the training needs momentum. It holds two more
vectors of the gradient's size per worker. With momentum 0 it is `ef`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.feedback._wrapping import (
    Forward,
    Result,
    SenderFeedback,
    as_dtype,
    check_inner,
    warn_unless_contracts,
)
from gradwire.compression.sparsification._selection import check_density, in_range
from gradwire.compression.sparsification.sampledk import SampledK
from gradwire.core.batched import Arguments, Elementwise, batched, order_of_rows
from gradwire.core.codec import Codec, Compression, State, check_input, scale_dtype
from gradwire.core.coded_rows import takes_rows
from gradwire.core.fusion import takes_motion
from gradwire.core.lifted import lift
from gradwire.core.memory import Role, Roles
from gradwire.core.node import Node
from gradwire.core.ramp import Moment, Ramp
from gradwire.core.reducer import Pushed, Reduced, Reducer
from gradwire.core.rows import split_rows
from gradwire.core.spec import Spec

_FIRST_DENSITY = 0.25  # of the warm-up


@dataclass(frozen=True, repr=False)
class DGC(SenderFeedback):
    """Accumulate momentum on each worker, before the largest elements are selected."""

    inner: Codec | Reducer | float  # type: ignore[assignment]  # a number: sampledk's density
    momentum: float = 0.9
    clip: float | None = None  # norm of a gradient over all workers; None: no clipping
    warmup: int = 0  # epochs until the density is reached
    nesterov: bool = False
    masking: bool | None = None  # zero u where elements were sent; None: if C selects elements

    paper = (
        "Lin et al. 2018, Deep gradient compression: Reducing the communication bandwidth for "
        "distributed training"
    )
    examples = (
        "dgc(0.001)",
        "dgc(0.1, momentum=0.5, clip=1.0, nesterov=True)",
        "dgc(topk(0.1) >> qsgd(bits=4), masking=False)",
        "dgc(randomk(0.1))",
        "dgc(sign, clip=2.0)",
    )
    memory: ClassVar[Roles] = {"residual": Role.LEFT, "velocity": Role.OWN}

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compression):
            check_density("dgc", self.inner)
            if not isinstance(self.inner, Ramp | Moment):
                object.__setattr__(self, "inner", float(self.inner))
        if self.warmup:
            object.__setattr__(self, "inner", self._with_warmup())
            object.__setattr__(self, "warmup", 0)  # it is in the ramp now
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"dgc: momentum lies in 0 .. 1, without 1, got {self.momentum}. Try 0.9."
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(
                f"dgc: clip is the norm to which gradients are cut, above 0, got {self.clip}. "
                "Leave it out to clip nothing."
            )
        check_inner(self, self.compression)
        if self.masking and not self.wrapped().is_sparse:
            raise ValueError(
                f"dgc({self.compression!r}, masking=True): {self.compression!r} sends something of "
                "every element, so all momentum would be stopped in every step. Leave masking out, "
                "or select elements, as topk does."
            )

    def _with_warmup(self) -> Ramp:
        if not isinstance(self.inner, float) or isinstance(self.inner, Ramp):
            raise ValueError(
                f"dgc: warmup is for a density, but {self.inner!r} is given. Write the ramp where "
                "its number stands, e.g. topk(ramp(0.25, 0.001, epochs=4, hold=1))."
            )
        if not self.warmup > 0 or not self.inner < _FIRST_DENSITY:
            raise ValueError(
                f"dgc: in a warm-up of {self.warmup} epochs the density would go from "
                f"{_FIRST_DENSITY} to {self.inner}; it takes epochs above 0 and a density below "
                f"{_FIRST_DENSITY}. Leave warmup out."
            )
        return Ramp(_FIRST_DENSITY, self.inner, epochs=float(self.warmup), hold=1.0)

    @cached_property
    def compression(self) -> Codec | Reducer:
        """C, the compression of the accumulated velocities."""
        return SampledK(self.inner) if isinstance(self.inner, float) else self.inner

    @cached_property
    def _lifted(self) -> Reducer:
        return lift(self.compression)

    @property
    def masks(self) -> bool:
        return self.wrapped().is_sparse if self.masking is None else self.masking

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        return "inside"

    @property
    def heavy_ball(self) -> tuple[float, bool]:
        return self.momentum, self.nesterov

    def init(self, spec: Spec, size: int) -> State:
        warn_unless_contracts(self, self.compression, spec, "more levels behind the selection")
        return {
            "residual": torch.zeros(spec.shape, dtype=spec.dtype),
            "velocity": torch.zeros(spec.shape, dtype=scale_dtype(spec.dtype)),
            "inner": self.wrapped().init(spec, size),
        }

    async def exchange(
        self, x: Tensor, state: State, node: Node, size: int, forward: Forward[Result]
    ) -> Result:
        motion = await node.call(make_motion, self, x, state, size)
        if takes_motion(self.compression):  # and so does all of it in one pass
            result = await forward(x, state["inner"], motion)
            velocity = motion.moved
        else:
            velocity, step = await node.call(_accumulate, self, x, motion)
            result = await forward(step, state["inner"], motion.residual)
            if self.masks:
                velocity = await node.call(_mask_velocity, velocity, result)
        kept = {"residual": result.residual, "velocity": velocity, "inner": result.state}
        return result.keeping(kept)


def _make_motion(method: DGC, x: Tensor, state: State, size: int, moved: Tensor) -> kernels.Motion:
    residual, velocity = state["residual"].to(x.device), state["velocity"].to(x.device)
    return kernels.Motion(
        residual,
        velocity,
        moved,
        method.momentum,
        1.0
        if method.clip is None
        else _clip_factor(method, x.detach(), method.clip * math.sqrt(size)),
        method.nesterov,
        method.masks,
    )


class _MotionRows(Elementwise):
    """The velocities of n workers, which encoding writes, get one memory: rows in the order of
    those of x."""

    def __init__(self) -> None:
        super().__init__(_make_motion, suits=lambda args: takes_rows(args[1].device))

    def run(self, calls: Sequence[Arguments]) -> list[kernels.Motion]:
        vectors = [x for _, x, _, _ in calls]
        first, dtype = vectors[0], calls[0][2]["velocity"].dtype
        memory = torch.empty(len(calls), *first.shape, dtype=dtype, device=first.device)
        motions: list[Any] = [None] * len(calls)
        for place, moved in zip(order_of_rows(vectors), split_rows(memory)):
            method, x, state, size = calls[place]
            motions[place] = _make_motion(method, x, state, size, moved)
        return motions


@batched(_MotionRows())
def make_motion(method: DGC, x: Tensor, state: State, size: int) -> kernels.Motion:
    shape, dtype = x.shape, state["velocity"].dtype
    if x.device.type == "cpu":
        moved = kernels.empty(x.numel(), dtype).reshape(shape)
    else:
        moved = torch.empty(shape, dtype=dtype, device=x.device)
    return _make_motion(method, x, state, size, moved)


def _clip_factor(method: DGC, x: Tensor, longest: float) -> float:
    """The factor that scales x down to norm `longest`, 1 if it is not longer."""
    inside, unit = in_range(x)
    norm = math.sqrt(kernels.moments(inside)[1]) * unit
    if not math.isfinite(norm):
        check_input(method, x)
    return 1.0 if norm <= longest else longest / norm


def _accumulate(method: DGC, x: Tensor, motion: kernels.Motion) -> tuple[Tensor, Tensor]:
    check_input(method, x)  # here, because saturating would hide infinities
    velocity, step = motion.step(x.detach())
    return velocity, as_dtype(step, x.dtype)


def _mask_velocity(velocity: Tensor, result: Reduced | Pushed) -> Tensor:
    return velocity.masked_fill(result.own() != 0, 0)
