"""Codecs that round every element to a narrower float."""

from abc import abstractmethod

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.codec import Algebra, Codec, Guarantee, Parts, State, check_input
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

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        if self.target.itemsize != 2 or not kernels.fuses(x):
            return super().encode(x, state, key)
        values = kernels.empty(x.numel(), self.target)
        if not kernels.narrow(x.detach(), values):
            check_input(self, x)
        return Payload.pack({"values": values}, self.context(Spec.of(x))), state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return _saturated(parts["values"], spec.dtype)


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`; a finite element beyond its range must not become infinite."""
    largest = torch.finfo(dtype).max
    narrowed = x.to(dtype)
    return narrowed.clamp(-largest, largest) if torch.finfo(x.dtype).max > largest else narrowed
