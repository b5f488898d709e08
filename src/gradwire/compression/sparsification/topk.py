"""Top-k: the k elements of largest magnitude (Aji and Heafield 2017; Stich et al. 2018).

A contraction with delta = k/d (Stich et al. 2018, Lemma A.1). The positions travel as a bitmap or
as Golomb-Rice coded gaps, whichever is shorter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.compression.sparsification._selection import check_density, num_kept, scatter
from gradwire.core.codec import Codec, Guarantee, Parts, State, expect
from gradwire.core.key import Key
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
        indices = torch.topk(x.abs(), k, sorted=False).indices.sort().values
        packed = encode_indices(indices, x.numel())
        return {"indices": packed, "values": x[indices]}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        packed, values = parts["indices"], parts["values"]
        expect(packed, "indices", packed.numel(), torch.uint8)
        return scatter(values, decode_indices(packed, spec.numel, values.numel()), spec)
