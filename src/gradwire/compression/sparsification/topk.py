"""Top-k: the k elements of largest magnitude (Aji and Heafield 2017; Stich et al. 2018).

A contraction with delta = k/d (Stich et al. 2018, Lemma A.1). The positions travel as a bitmap or
as Golomb-Rice coded gaps, whichever is shorter.

What k is a fraction of is decided by the schedule's buckets: the whole model if there is one bucket
(global top-k), each layer with `sequential("layer")`.

Use it as `ef(topk(0.01))`, the first sparsifier to try, best where a few elements hold most of the
norm, as in real gradients; `>> fp16` or `>> qsgd(bits=4)` cuts the values at hardly any loss.
Gathered messages grow with the number of workers: with many see `gtopk` and `randomk`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression.sparsification._selection import check_density, num_kept, scatter
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Parts,
    State,
    check_input,
    expect,
    is_finite,
)
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class TopK(Codec):
    """Keep the elements of largest magnitude, and say where they were."""

    density: float  # fraction kept

    paper = "Stich et al. 2018, Sparsified SGD with memory"
    examples = ("topk(0.01)", "topk(0.3)", "topk(1.0)")

    parts = ("indices", "values")
    selects = True

    def __post_init__(self) -> None:
        check_density("topk", self.density)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(delta=num_kept(self.density, spec.numel) / max(1, spec.numel))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec((num_kept(self.density, spec.numel),), spec.dtype)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        k = num_kept(self.density, x.numel())
        indices, values = kernels.select_largest(x, None, k)
        return {"indices": encode_indices(indices, x.numel()), "values": values}, state

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        if not kernels.fuses(x, residual):
            return super().encode_feedback(x, residual, state, key)
        lost = kernels.empty(x.numel())
        k = num_kept(self.density, x.numel())
        indices, values = kernels.select_largest(x.detach(), residual.detach(), k, lost)
        if not is_finite(values):  # NaN and infinity are always among the largest
            check_input(self, x + residual)
        parts = {"indices": encode_indices(indices, x.numel()), "values": values}
        return Payload.pack(parts, self.context(Spec.of(x))), lost.reshape(x.shape), state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        packed, values = parts["indices"], parts["values"]
        expect(packed, "indices", packed.numel(), torch.uint8)
        return scatter(values, decode_indices(packed, spec.numel, values.numel()), spec)
