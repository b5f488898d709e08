"""Top-k: the k elements of largest magnitude (Aji and Heafield 2017; Stich et al. 2018).

A contraction with delta = k/d (Stich et al. 2018). The positions travel as a bitmap or
as Golomb-Rice coded gaps, whichever is shorter.

What k is a fraction of is decided by the schedule's buckets: the whole model if there is one bucket
(global top-k), each layer with `sequential("layer")`.

Use it as `ef(topk(0.01))`, the first sparsifier to try, best where a few elements hold most of the
norm, as in real gradients; `>> fp16` or `>> qsgd(bits=4)` cuts the values at hardly any loss.
Gathered messages grow with the number of workers: with many see `gtopk` and `randomk`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression.sparsification._families import Entries, Selector
from gradwire.compression.sparsification._selection import check_density, num_kept
from gradwire.core.codec import Guarantee, Parts, expect
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class TopK(Entries, Selector):
    """Keep the elements of largest magnitude, with their positions."""

    density: float  # fraction kept

    paper = "Stich et al. 2018, Sparsified SGD with memory"
    examples = ("topk(0.01)", "topk(0.3)", "topk(1.0)")

    adds_residual = True
    takes_motion = True
    chooses_rows = True
    counts_entries = False

    def __post_init__(self) -> None:
        check_density("topk", self.density)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(delta=num_kept(self.density, spec.numel) / max(1, spec.numel))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec((num_kept(self.density, spec.numel),), spec.dtype)

    def choose(
        self,
        x: Tensor,
        key: Key,
        residual: kernels.Residual | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return kernels.select_largest(x, residual, num_kept(self.density, x.numel()), out)

    def choose_rows(
        self,
        x: Tensor,
        keys: Sequence[Key],
        residual: kernels.Residual | None,
        out: Tensor | None,
    ) -> list[tuple[Tensor, Tensor]]:
        return kernels.select_largest_rows(x, residual, num_kept(self.density, x.shape[1]), out)

    def make_parts(self, indices: Tensor, values: Tensor, numel: int) -> Parts:
        return {"indices": encode_indices(indices, numel), "values": values}

    def positions(self, parts: Parts, spec: Spec) -> Tensor:
        packed = expect(parts["indices"], "indices", parts["indices"].numel(), torch.uint8)
        return decode_indices(packed, spec.numel, parts["values"].numel())
