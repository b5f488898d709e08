"""Shared by the wrappers around a compression: checks of the inner one, and running estimates.

A running estimate is a vector that sender and receivers build from the same messages. It is kept
in float32 for 16-bit tensors, where small steps would be lost; `None` is zero.
"""

import warnings
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor

from gradwire.core.codec import (
    Algebra,
    Codec,
    State,
    check_input,
    clamp_to,
    scale_dtype,
)
from gradwire.core.errors import GradwireWarning
from gradwire.core.fusion import Residual
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import Lifted, lift
from gradwire.core.node import Node
from gradwire.core.notation import notation_name
from gradwire.core.reducer import Pushed, Reduced, Reducer, innermost
from gradwire.core.spec import Spec
from gradwire.kernels import Motion


class Feedback(Reducer):
    """A reducer with a residual, an estimate, or momentum before compression.

    Feedback within feedback is refused: `check_inner`.
    """

    inner: Codec | Reducer

    @property
    def momentum_lives(self) -> Literal["before", "after", "inside"]:
        return "before"

    def wrapped(self) -> Reducer | None:
        return lift(self.inner)

    def refuse_residual(self, residual: Tensor | None) -> None:
        if residual is not None:
            raise ValueError(
                f"{self!r} keeps what was lost by itself: feedback within feedback. "
                "Leave out the wrapper around it."
            )


Result = TypeVar("Result", Reduced, Pushed)
# Hands a vector on to the inner compression, with its state and a residual, if there is one.
Forward = Callable[[Tensor, State, Residual | None], Awaitable[Result]]


class SenderFeedback(Feedback):
    """Feedback whose memory is the sender's alone: receivers decode with the inner compression.

    So `mean` and `push` are one `exchange`, and differ in where the inner result goes.
    """

    @abstractmethod
    async def exchange(
        self, x: Tensor, state: State, node: Node, size: int, forward: Forward[Result]
    ) -> Result:
        """What `forward` gives for x corrected by what is remembered, with the new state.

        `size` is the number of workers that take part.
        """

    @cached_property
    def _lifted(self) -> Reducer:
        return lift(self.inner)

    def wrapped(self) -> Reducer:
        return self._lifted  # every exchange asks for it

    @property
    def can_push(self) -> bool:
        return self.wrapped().can_push

    @property
    def num_messages(self) -> int:
        return self.wrapped().num_messages

    def decode_push(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        return self.wrapped().decode_push(messages, spec, key)

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        self.refuse_residual(residual)
        inner = self.wrapped()

        async def forward(sent: Tensor, own: State, kept: Residual | None) -> Reduced:
            if isinstance(kept, Motion):
                assert isinstance(inner, Lifted), f"{inner!r} takes no motion"
                return await inner.mean(sent, own, key, group, kept)
            return await inner.mean(sent, own, key, group, kept)

        return await self.exchange(x, state, group.node, group.size, forward)

    async def push(
        self, x: Tensor, state: State, key: Key, node: Node, residual: Tensor | None = None
    ) -> Pushed:
        self.refuse_residual(residual)
        inner = self.wrapped()

        async def forward(sent: Tensor, own: State, kept: Residual | None) -> Pushed:
            if isinstance(kept, Motion):
                assert isinstance(inner, Lifted), f"{inner!r} takes no motion"
                return await inner.push(sent, own, key, node, kept)
            return await inner.push(sent, own, key, node, kept)

        return await self.exchange(x, state, node, 1, forward)


def check_inner(wrapper: Reducer, inner: Codec | Reducer) -> None:
    """Refuses feedback within feedback, and what cannot stand on its own."""
    if _has_feedback(inner):
        name = notation_name(type(wrapper))
        raise ValueError(f"{name}({inner!r}): feedback within feedback; one is enough")
    lift(inner)


def check_left(wrapper: Reducer, inner: Codec | Reducer) -> None:
    """Refuses codecs whose selection needs what error feedback accumulates over steps."""
    for part in innermost(inner):
        if isinstance(part, Codec) and part.traits.needs_feedback:
            name = notation_name(type(wrapper))
            raise ValueError(
                f"{name}({inner!r}): {part!r} chooses from what error feedback accumulates: "
                f"write ef({part!r})"
            )


def check_means(wrapper: Reducer, inner: Codec | Reducer) -> None:
    """Refuses an inner compression whose mean is not the mean of each worker's decoded message. A
    worker's estimate and the group's copy of it would drift apart for good.
    """
    check_inner(wrapper, inner)
    check_left(wrapper, inner)
    name = notation_name(type(wrapper))
    for part in innermost(inner):
        averages = part.averages_exactly if isinstance(part, Reducer) else False
        if isinstance(part, Codec):
            averages = part.algebra is not Algebra.MERGE
        if not averages:
            raise ValueError(
                f"{name}({inner!r}): {part!r} agrees on something else than the mean of what each "
                f"worker sent, from which {name} would drift away. Write ef({part!r})."
            )


def check_alone(wrapper: Reducer, inner: Codec | Reducer, instead: str) -> None:
    """Refuses an inner compression that needs a message of every worker in every step."""
    why = None
    if not isinstance(inner, Codec):
        why = "averages in exchanges in which all workers take part"
    elif inner.traits.statistic is not None:
        why = "needs a maximum over all workers in every step"
    if why is not None:
        name = notation_name(type(wrapper))
        raise ValueError(f"{name}({inner!r}): {inner!r} {why}, but some send nothing. {instead}")


def check_scatters(wrapper: Reducer, inner: Codec | Reducer, instead: str) -> None:
    """Refuses an inner compression whose means are not reencoded on the scatter route."""
    why = None
    if not isinstance(inner, Codec) or inner.algebra is not Algebra.OPAQUE:
        why = "is averaged on the way, so no server encodes a mean again"
    elif inner.traits.layered:
        why = "works on whole layers, which cannot be cut into one shard per server"
    if why is not None:
        name = notation_name(type(wrapper))
        raise ValueError(f"{name}({inner!r}): {inner!r} {why}. {instead}")


def check_shards(wrapper: Reducer, inner: Codec, spec: Spec, size: int) -> None:
    """Refuses a codec whose error, fed back by the owner of a shard, need not die out."""
    shard = Spec((-(-spec.numel // size),), spec.dtype)
    if not inner.guarantee(shard).contracts:
        raise ValueError(
            f"{wrapper!r}: {inner!r} is no contraction on shards of {shard.numel} elements "
            f"(omega = {inner.guarantee(shard).omega}), so the residual of a server would "
            "grow. Take more levels, smaller buckets or a contraction such as sign or topk."
        )


def warn_unless_contracts(
    wrapper: Reducer, inner: Codec | Reducer, spec: Spec, instead: str = "diana(...)"
) -> None:
    """Warns of codecs whose residual may grow."""
    if isinstance(inner, Codec) and not inner.guarantee(spec).contracts:
        omega = inner.guarantee(spec).omega
        variance = "is no contraction" if omega is None else f"has omega = {omega:.3g}"
        warnings.warn(
            f"{wrapper!r}: {inner!r} {variance}. What is left is sure to shrink only for "
            f"contractions and unbiased codecs with omega < 1; if it diverges, take {instead}.",
            GradwireWarning,
            stacklevel=3,
        )


def on_gather_route(group: Group) -> Group:
    """The group, with payloads gathered rather than averaged and reencoded on the way. Running
    estimates need it: the rounding errors of 16-bit means would add up over the steps.
    """
    other = group.on_route("gather")
    other.exact = True
    return other


def on_scatter_route(group: Group) -> Group:
    """The group, with shards averaged and reencoded by their owners."""
    return group.on_route("scatter")


def difference(wrapper: Reducer, x: Tensor, estimate: Tensor | None) -> Tensor:
    """What the estimate lacks, in the dtype of x."""
    x = x.detach()
    check_input(wrapper, x)  # here, because saturating would hide infinities
    if estimate is None:
        return x
    return as_dtype(x.to(estimate.dtype) - estimate.to(x.device), x.dtype)


def advance(estimate: Tensor | None, step: Tensor, rate: float = 1.0) -> Tensor:
    """The estimate, moved by `rate` times the step."""
    if rate != 1.0:
        step = rate * step.to(scale_dtype(step.dtype))
    if estimate is None:
        return step.to(scale_dtype(step.dtype))
    return estimate.to(step.device) + step


def advance_own(estimate: Tensor | None, reduced: Reduced, rate: float = 1.0) -> Tensor:
    """The worker's own estimate, moved by `rate` times what the group received from it."""
    return advance(estimate, reduced.own(), rate)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, if it has this dtype; else converted, and saturated."""
    return x if x.dtype == dtype else clamp_to(x, dtype)


def _has_feedback(inner: object) -> bool:
    if isinstance(inner, Mapping):
        return any(_has_feedback(value) for value in inner.values())
    if not isinstance(inner, Reducer):
        return False
    held = [getattr(inner, field.name) for field in fields(inner)]  # type: ignore[arg-type]
    return isinstance(inner, Feedback) or any(_has_feedback(value) for value in held)
