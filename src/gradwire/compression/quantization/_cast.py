"""Codecs that round every element to a narrower float."""

from abc import abstractmethod

import torch
from torch import Tensor

from gradwire.core.codec import Algebra, Codec, Guarantee, Parts, State
from gradwire.core.key import Key
from gradwire.core.spec import Spec


class Cast(Codec):
    """Rounds to `target`. Sums of payloads round again, so it is linear only up to rounding."""

    algebra = Algebra.LINEAR

    @property
    @abstractmethod
    def target(self) -> torch.dtype: ...

    def guarantee(self, spec: Spec) -> Guarantee:
        # Round to nearest: at most half a unit in the last place, eps / 2, of each element.
        return Guarantee(delta=1 - (torch.finfo(self.target).eps / 2) ** 2)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, self.target)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"values": _saturated(x, self.target)}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return _saturated(parts["values"], spec.dtype)


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as `dtype`; a finite element beyond its range must not become infinite."""
    largest = torch.finfo(dtype).max
    narrowed = x.to(dtype)
    return narrowed.clamp(-largest, largest) if torch.finfo(x.dtype).max > largest else narrowed
