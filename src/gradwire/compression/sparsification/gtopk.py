"""gTop-k: the k largest elements of the sum, found by a tree of merges (Shi et al. 2019).

Every worker selects the k largest elements of its vector. Pairs of workers add their two sparse
vectors and keep the k largest elements of the sum, up a binomial tree; what is left at the root
is sent to all and divided by n. Every message holds k elements, so a worker sends and receives
O(k log n), where gathering the top-k of all workers takes k (n - 1).

Feedback, as in the paper: a worker keeps what it did not select, and takes back what it selected
at positions that the result does not have,

    e <- x - x * mask * global mask.

This does not conserve mass exactly from three workers on. If a partial sum is dropped in one branch
of the tree while another branch brings the same position into the result, the workers of the
first branch believe that theirs were added. What is lost so was too small for the k largest of a
partial sum. With two workers, or where k holds all that is selected, nothing is lost.

The groups of some architectures have no tree (a ring merges along itself); the result may differ
where sums are dropped, the rule does not.

Use it as `ef(gtopk(0.01))` with many workers on a slow network, where gathering the top-k of all
workers grows too long. With few workers take `ef(topk(0.01))`, which keeps more of the mean and
loses nothing on the way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.sparsification._selection import check_density, scatter
from gradwire.compression.sparsification.topk import TopK
from gradwire.core.codec import (
    Compression,
    State,
    checked_values,
    clamp_to,
    corrected,
    is_finite,
    payload_context,
    scale_dtype,
    unpack,
)
from gradwire.core.errors import WireError
from gradwire.core.group import Group, Merging
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class GTopK(Reducer):
    """Merge the workers' largest elements pairwise, keeping the largest of each sum."""

    density: float  # fraction kept, by each worker and in the result

    paper = (
        "Shi et al. 2019, A distributed synchronous SGD algorithm with global top-k sparsification "
        "for low bandwidth networks"
    )
    examples = ("gtopk(0.01)", "ef(gtopk(0.001))")

    def __post_init__(self) -> None:
        check_density("gtopk", self.density)

    @property
    def is_sparse(self) -> bool:
        return True

    def unfed(self, spec: Spec) -> Compression | None:
        return self

    def init(self, spec: Spec, size: int) -> State:
        return None

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        node, spec = group.node, Spec.of(x).flat()
        full = await node.call(_corrected, x, residual)
        tree = _Tree(TopK(self.density), spec)
        mine = await node.call(tree.select, full)
        merged = await group.reduce_tree(mine.buffer, tree)
        where, mean = await node.share(_average, tree, merged, group.size)
        taken = partial(_own_contribution, tree, full, mine, where)
        return Reduced(
            mean.reshape(x.shape),
            lambda: taken().reshape(x.shape),
            state,
            None if residual is None else await node.call(_residual, full, taken, x.shape),
        )


def _corrected(x: Tensor, residual: Tensor | None) -> Tensor:
    return corrected(x, residual).reshape(-1).contiguous()


def _residual(full: Tensor, taken: Callable[[], Tensor], shape: torch.Size) -> Tensor:
    return (full - taken()).reshape(shape)


@dataclass(frozen=True)
class _Tree(Merging):
    """Packed sparse vectors of k elements each, and their merges."""

    codec: TopK  # what a message looks like on the wire
    spec: Spec

    def select(self, x: Tensor) -> Payload:
        return self.codec.encode(x, None, Key(0))[0]

    def read(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [k], increasing, and values [k] of a received message."""
        parts = unpack(self.codec, buffer, self.spec).parts
        values = checked_values(self.codec, parts["values"], self.codec.values_spec(self.spec, {}))
        if not is_finite(values):
            raise WireError("values: NaN or infinity in a sparse vector")
        return self.codec.positions({**parts, "values": values}, self.spec), values

    def merge(self, a: Tensor, b: Tensor, /) -> Tensor:
        """The k largest elements of the sum of two vectors of k elements."""
        (at, values), (other_at, other) = self.read(a), self.read(b)
        union, place = torch.unique(torch.cat([at, other_at]), return_inverse=True)
        wide = scale_dtype(values.dtype)
        total = torch.zeros(union.numel(), dtype=wide, device=values.device)
        total.index_add_(0, place, torch.cat([values, other]).to(wide))
        total = clamp_to(total, values.dtype)
        kept, values = kernels.select_largest(total, None, values.numel())
        parts = self.codec.make_parts(union[kept], values, self.spec.numel)
        return Payload.pack(parts, payload_context(self.codec, self.spec)).buffer


def _average(tree: _Tree, buffer: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The positions in the result, and the mean."""
    where, total = tree.read(buffer)
    return where, scatter(total / size, where, tree.spec)


def _own_contribution(tree: _Tree, x: Tensor, mine: Payload, where: Tensor) -> Tensor:
    """This worker's contribution: its selected elements, at the positions of the result."""
    selected, _ = tree.read(mine.buffer)
    both = selected[torch.isin(selected, where, assume_unique=True)]
    return scatter(x[both], both, tree.spec)
