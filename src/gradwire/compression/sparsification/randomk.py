"""Random-k with a shared seed: every rank draws the same positions, so none travel.

A contraction with delta = k/d, or unbiased with omega = d/k - 1 when scaled (Stich et al. 2018,
Lemma A.1; Konecny et al. 2016). Equal positions make it linear: payloads add.

We draw one position from each of k equal strata instead of a uniform k-subset. Every element is
still kept with probability k/d, which is all that both bounds use; it takes k draws instead of d,
and the positions come out sorted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compression.sparsification._selection import check_density, num_kept, scatter
from gradwire.core.codec import Algebra, Codec, Guarantee, Parts, State
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class RandomK(Codec):
    """Keep elements at random positions that all ranks agree on without sending them."""

    density: float  # fraction kept
    unbiased: bool = False  # scale by 1/density: no bias, but no contraction either

    paper = "Stich et al. 2018, Sparsified SGD with memory"
    examples = ("randomk(0.01)", "randomk(0.3)", "randomk(0.1, unbiased=True)")

    algebra = Algebra.LINEAR

    def __post_init__(self) -> None:
        check_density("randomk", self.density)

    @property
    def selects(self) -> bool:
        return not self.unbiased

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
        return {"values": values * sizes.to(x.dtype) if self.unbiased else values}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        indices, _ = self._positions(spec.numel, key, parts["values"].device)
        return scatter(parts["values"], indices, spec)

    def _positions(self, numel: int, key: Key, device: torch.device) -> tuple[Tensor, Tensor]:
        """One position in each stratum, and the strata's sizes: int64 [k] both."""
        k = num_kept(self.density, numel)
        edges = torch.arange(k + 1, dtype=torch.int64, device=device) * numel // max(1, k)
        sizes = edges.diff()
        words = key.shared().words(k, device).to(torch.int64) & 0xFFFFFFFF
        return edges[:-1] + (words * sizes >> 32), sizes
