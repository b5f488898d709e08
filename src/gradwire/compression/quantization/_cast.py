"""Codecs that round every element to a narrower float."""

from abc import abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.codec import (
    Algebra,
    Codec,
    Guarantee,
    Parts,
    State,
    check_encoded,
    check_input,
    corrected,
    in_shape,
    payload_context,
    without_graph,
)
from gradwire.core.fusion import Fusion, Residual
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec


class Cast(Codec):
    """Rounds to `target`. Sums of payloads round again, so it is linear only up to rounding."""

    algebra = Algebra.LINEAR

    @property
    @abstractmethod
    def target(self) -> torch.dtype: ...

    def guarantee(self, spec: Spec) -> Guarantee:
        # Round to nearest: at most half a unit in the last place, eps / 2, of each normal element.
        # The last binade may saturate, which costs it no more.
        target, own = torch.finfo(self.target), torch.finfo(spec.dtype)
        is_covered = target.tiny <= own.tiny and 2 * target.max > own.max
        within = None if is_covered else (target.tiny, target.max)
        return Guarantee(delta=1 - (target.eps / 2) ** 2, within=within)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, self.target)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"values": _saturated(x, self.target)}, state

    @cached_property
    def fusion(self) -> "_CastFusion":
        return _CastFusion(self)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return _saturated(parts["values"], spec.dtype)


class _CastFusion(Fusion[Cast]):
    """Rounds and looks for what is not finite in one pass."""

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State] | None:
        if self.codec.target.itemsize != 2 or not kernels.fuses(x):
            return None
        values = kernels.empty(x.numel(), self.codec.target, x.device)
        is_good = kernels.narrow(without_graph(x), values)
        return self._payload(x, None, values, is_good), state

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State] | None:
        if self.codec.target.itemsize != 2 or not isinstance(residual, Tensor):
            return None
        if residual.shape != x.shape or residual.device != x.device:
            return None
        if not kernels.fuses(x, residual):
            return None
        lost = kernels.empty(x.numel(), device=x.device) if out is None else out
        values = kernels.empty(x.numel(), self.codec.target, x.device)
        is_good = kernels.narrow_sum(without_graph(x), without_graph(residual), values, lost)
        return self._payload(x, residual, values, is_good), in_shape(lost, x), state

    def _payload(
        self, x: Tensor, residual: Tensor | None, values: Tensor, is_good: bool | None
    ) -> Payload:
        codec = self.codec
        if is_good is False:
            check_input(codec, corrected(x, residual))
        payload = Payload.deferred({"values": values}, payload_context(codec, Spec.of(x)))
        if is_good is None:
            check_encoded(codec, x, payload, values)
        return payload


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`; a finite element beyond its range must not become infinite."""
    largest = torch.finfo(dtype).max
    narrowed = kernels.empty(x.numel(), dtype, x.device).view(x.shape).copy_(x)
    return narrowed.clamp(-largest, largest) if torch.finfo(x.dtype).max > largest else narrowed
