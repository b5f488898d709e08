"""What the wrappers around a compression share: what they refuse, and running estimates.

A running estimate is a vector that sender and receivers build from the same messages. It is kept
in float32 for 16-bit tensors, where small steps would be lost; `None` is zero.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gradwire.compression.partition import Partition
from gradwire.core.codec import (
    Algebra,
    Codec,
    Compression,
    check_input,
    clamp_to,
    scale_dtype,
)
from gradwire.core.errors import GradwireWarning
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.notation import notation_name
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


class Feedback(Reducer):
    """A reducer that remembers what was lost, or gathers momentum before anything is.

    No two that remember may be around one another: `check_inner`.
    """

    inner: Codec | Reducer

    # Whether what others hear of a worker is what they hear through the inner compression alone.
    is_heard_through_inner: ClassVar[bool] = False

    @property
    def one_way(self) -> bool:
        inner = self.wrapped()
        return self.is_heard_through_inner and inner is not None and inner.one_way

    @property
    def num_messages(self) -> int:
        inner = self.wrapped()
        return 1 if inner is None else inner.num_messages

    def heard(self, messages: Sequence[Tensor], spec: Spec, key: Key) -> Tensor:
        inner = self.wrapped()
        if inner is None or not self.is_heard_through_inner:
            return super().heard(messages, spec, key)
        return inner.heard(messages, spec, key)

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


def check_inner(wrapper: Reducer, inner: Codec | Reducer) -> None:
    """Refuses feedback within feedback, and what cannot stand on its own."""
    if _has_feedback(inner):
        name = notation_name(type(wrapper))
        raise ValueError(f"{name}({inner!r}): feedback within feedback; one is enough")
    lift(inner)


def check_left(wrapper: Reducer, inner: Codec | Reducer) -> None:
    """Refuses codecs that choose from what error feedback accumulates over steps."""
    for part in leaves(inner):
        if isinstance(part, Codec) and part.needs_feedback:
            name = notation_name(type(wrapper))
            raise ValueError(
                f"{name}({inner!r}): {part!r} chooses from what error feedback accumulates: "
                f"write ef({part!r})"
            )


def check_heard(wrapper: Reducer, inner: Codec | Reducer) -> None:
    """Refuses an inner whose mean is not the mean of what each worker was heard to say.

    A worker and the group that follows it would drift apart, and nothing would bring them back.
    """
    check_inner(wrapper, inner)
    check_left(wrapper, inner)
    name = notation_name(type(wrapper))
    for part in leaves(inner):
        merges = isinstance(part, Codec) and part.algebra is Algebra.MERGE
        if merges or (isinstance(part, Reducer) and not part.averages_own):
            raise ValueError(
                f"{name}({inner!r}): {part!r} agrees on something else than the mean of what each "
                f"worker sent, from which {name} would drift away. Write ef({part!r})."
            )


def check_alone(wrapper: Reducer, inner: Codec | Reducer, instead: str) -> None:
    """Refuses an inner that needs everyone's word in every step."""
    why = None
    if not isinstance(inner, Codec):
        why = "averages in exchanges in which everyone takes part"
    elif inner.shares:
        why = "needs a maximum over all workers in every step"
    if why is not None:
        name = notation_name(type(wrapper))
        raise ValueError(
            f"{name}({inner!r}): {inner!r} {why}, but some have nothing to say. {instead}"
        )


def check_scatters(wrapper: Reducer, inner: Codec | Reducer, instead: str) -> None:
    """Refuses an inner whose means nobody encodes again on the scatter route."""
    why = None
    if not isinstance(inner, Codec) or inner.algebra is not Algebra.OPAQUE:
        why = "is averaged on the way, so no server encodes a mean again"
    elif inner.layered:
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


def warn_unless_settles(
    wrapper: Reducer, inner: Codec | Reducer, spec: Spec, instead: str = "diana(...)"
) -> None:
    """Warns of codecs that may leave more than there was."""
    if isinstance(inner, Codec) and not inner.guarantee(spec).contracts:
        omega = inner.guarantee(spec).omega
        variance = "is no contraction" if omega is None else f"has omega = {omega:.3g}"
        warnings.warn(
            f"{wrapper!r}: {inner!r} {variance}. What is left is sure to shrink only for "
            f"contractions and unbiased codecs with omega < 1; if it diverges, take {instead}.",
            GradwireWarning,
            stacklevel=3,
        )


def gathering(group: Group) -> Group:
    """The group, with payloads gathered rather than averaged and encoded again on the way.

    For running estimates: what a mean in 16 bits loses would add up over the steps.
    """
    other = group.on_route("gather")
    other.exact = True
    return other


def scattering(group: Group) -> Group:
    """The group, with shards averaged by their owners, who encode the mean again."""
    return group.on_route("scatter")


def difference(wrapper: Reducer, x: Tensor, estimate: Tensor | None) -> Tensor:
    """What the estimate lacks, in the dtype of x."""
    x = x.detach()
    check_input(wrapper, x)  # here, because saturating would hide infinities
    if estimate is None:
        return x
    return as_dtype(x.to(estimate.dtype) - estimate.to(x.device), x.dtype)


def advanced(estimate: Tensor | None, step: Tensor, rate: float = 1.0) -> Tensor:
    """The estimate, moved by `rate` times the step."""
    if rate != 1.0:
        step = rate * step.to(scale_dtype(step.dtype))
    if estimate is None:
        return step.to(scale_dtype(step.dtype))
    return estimate.to(step.device) + step


def moved(estimate: Tensor | None, reduced: Reduced, rate: float = 1.0) -> Tensor:
    """The estimate of one's own, moved by `rate` times what the group heard from it."""
    return advanced(estimate, reduced.own(), rate)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, if it has this dtype; else converted, and saturated."""
    return x if x.dtype == dtype else clamp_to(x, dtype)


def leaves(inner: Compression) -> Iterator[Compression]:
    """The compressions that do the work: the rules of a partition, or the inner itself."""
    if isinstance(inner, Partition):
        for rule in inner.rules.values():
            yield from leaves(rule)
    else:
        yield inner


def _has_feedback(inner: object) -> bool:
    if isinstance(inner, Mapping):
        return any(_has_feedback(value) for value in inner.values())
    if not isinstance(inner, Reducer):
        return False
    held = [getattr(inner, field.name) for field in fields(inner)]  # type: ignore[arg-type]
    return isinstance(inner, Feedback) or any(_has_feedback(value) for value in held)
