"""Random-k: elements at random positions, which all ranks draw alike, so none travel.

A contraction with delta = 1/m, or unbiased with omega = m - 1 when scaled, where m is d/k rounded
up (Stich et al. 2018 and Konecny et al. 2016, for m = d/k). Equal positions make it linear:
payloads add.

We draw one position from each of k strata instead of a uniform k-subset; it takes k draws instead
of d, and the positions come out sorted. If k divides d all strata have d/k elements and every
element is kept with probability k/d. If not, strata have d/k elements rounded down or up, and an
element is kept with probability 1 over the size of its stratum: k/d only on average. What is scaled
is multiplied by that size, so it stays unbiased; m is the size of the largest stratum.

With `shared=False` every rank draws positions of its own, from its private key. The errors of n
ranks are then independent, so their mean has 1/n of the variance, but payloads no longer add. A
receiver knows the sender's key, so positions still need not travel; `indices=True` sends them to
receivers that do not.

Use it as `ef(randomk(0.01))`, or `unbiased=True` at larger densities without `ef(...)`, where
selection must cost nothing or payloads must add in an all-reduce. At the same density `topk` keeps
far more of a gradient, the more the heavier its tails.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression.sparsification._selection import (
    check_density,
    num_kept,
    scatter,
    strata,
)
from gradwire.core.codec import (
    Algebra,
    Codec,
    Guarantee,
    Parts,
    State,
    Traits,
    clamp_to,
    expect,
    scale_dtype,
)
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class RandomK(Codec):
    """Keep elements at random positions, by default the same on all ranks: none is sent."""

    density: float  # fraction kept
    unbiased: bool = False  # scale by 1/density: no bias, but no contraction either
    shared: bool = True  # all ranks keep the same positions, so payloads add
    indices: bool = False  # send the positions too, for receivers without the sender's key

    paper = "Stich et al. 2018, Sparsified SGD with memory"
    examples = (
        "randomk(0.01)",
        "randomk(0.3)",
        "randomk(0.1, unbiased=True)",
        "randomk(0.3, shared=False)",
        "randomk(0.1, unbiased=True, shared=False, indices=True)",
    )

    def __post_init__(self) -> None:
        check_density("randomk", self.density)
        if self.indices and self.shared:
            raise ValueError(
                "randomk: indices=True sends positions that all ranks know with shared=True. "
                "Write shared=False, indices=True, or leave indices out."
            )

    @property
    def algebra(self) -> Algebra:
        return Algebra.LINEAR if self.shared else Algebra.OPAQUE

    @property
    def parts(self) -> tuple[str, ...]:
        return ("indices", "values") if self.indices else ("values",)

    @property
    def traits(self) -> Traits:
        return Traits(selects=not self.unbiased)

    def guarantee(self, spec: Spec) -> Guarantee:
        # Strata differ by at most one element; the largest one is kept with least probability.
        largest = -(-spec.numel // max(1, num_kept(self.density, spec.numel)))
        if self.unbiased:
            return Guarantee(omega=float(max(0, largest - 1)))
        return Guarantee(delta=1 / max(1, largest))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec((num_kept(self.density, spec.numel),), spec.dtype)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        indices, sizes = self._positions(x.numel(), key, x.device)
        values = x[indices]
        if self.unbiased:
            wide = values.to(scale_dtype(x.dtype))
            values = clamp_to(wide * sizes.to(wide.dtype), x.dtype)
        parts = {"values": values}
        if self.indices:
            parts["indices"] = encode_indices(indices, x.numel())
        return parts, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        values = parts["values"]
        if self.indices:
            packed = expect(parts["indices"], "indices", parts["indices"].numel(), torch.uint8)
            return scatter(values, decode_indices(packed, spec.numel, values.numel()), spec)
        return scatter(values, self._positions(spec.numel, key, values.device)[0], spec)

    def _positions(self, numel: int, key: Key, device: torch.device) -> tuple[Tensor, Tensor]:
        """One position in each stratum, and the strata's sizes: int64 [k] both."""
        k = num_kept(self.density, numel)
        return strata(k, numel, key.shared() if self.shared else key, device)
