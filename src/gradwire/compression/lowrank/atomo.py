"""Spectral ATOMO: singular triples kept at random, without bias (Wang et al. 2018).

A matrix M = sum of s_i u_i v_i^T keeps each triple with probability p_i, as s_i / p_i u_i v_i^T.
The expectation is M, and the variance sum of s_i^2 (1 / p_i - 1) is least, for `rank` triples on
average, with

    p_i = min(1, rank * s_i / sum of s_j),

where the budget that capped triples leave goes to the others in the same way (Wang et al. 2018,
Alg. 1). Since equal probabilities rank / r are a choice too, where r = min(n, m),
the variance is at most omega |M|^2 with omega = r / rank - 1.

On the wire a triple is two vectors, s_i / p_i u_i and v_i: the scale needs no number of its own.
How many there are varies and travels for each matrix. Matrices are those of the tensors in the
bucket, [n, ...] read as [n, m]; vectors, and matrices that `rank` triples would not shrink, travel
as they are. A vector about whose tensors nothing is known is laid out as the squarest matrix,
filled up with zeros: still unbiased, but without the low rank that makes a layer's gradient
compress well. Buckets are gathered whole: shards would cut the matrices.

The sign of a singular pair is open; we make the largest entry of u positive. What is left to the
library that decomposes: the last bits, bases of equal singular values, and which of two entries of
nearly equal size is the largest; there two devices may send different bytes of equal value.

Use it without `ef(...)` where an unbiased low-rank estimate is wanted, for layers whose singular
values fall off fast. One triple of each matrix has a large variance and every step takes a
decomposition of each matrix; where feedback is allowed take `ef(powersgd(2))`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor

from gradwire.compression._layers import tensors_covering
from gradwire.compression.lowrank._matrix import (
    Layout,
    kept_tensors,
    layout,
    magnitude_unit,
    matrix_shape,
)
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    Traits,
    clamp_to,
    expect,
    scale_dtype,
)
from gradwire.core.errors import WireError
from gradwire.core.fusion import SaturatingFeedback
from gradwire.core.key import Key
from gradwire.core.spec import Placed, Spec


@dataclass(frozen=True, repr=False)
class Atomo(Codec):
    """Keep singular triples of each layer's matrix at random, large ones more often, unbiased."""

    rank: int  # triples kept of each matrix, on average

    paper = "Wang et al. 2018, ATOMO: Communication-efficient learning via atomic sparsification"
    examples = ("atomo(3)", "atomo(1)")

    leaves = Kind.NOTHING
    parts = ("counts", "factors", "plain")
    traits = Traits(layout=kept_tensors)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"atomo: rank must be at least 1, got {self.rank}. Try 3.")

    def init(self, spec: Spec) -> State:
        return spec.layout

    def guarantee(self, spec: Spec) -> Guarantee:
        stacks = _make_layout(spec.flat().layout, self.rank).stacks
        return Guarantee(omega=max((min(s.n, s.m) / self.rank - 1 for s in stacks), default=0.0))

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        plan = _make_layout(tensors_covering(state, x.numel()), self.rank)
        padded = torch.nn.functional.pad(x, (0, plan.numel - x.numel()))
        counts, factors = [], []
        for number, matrices in enumerate(plan.matrices(padded)):  # one of each shape
            u, s, vh = _decompose(matrices)
            p = _probabilities(s, self.rank)
            draws = key.child(number).uniform64(p.numel(), x.device).view(p.shape)
            kept = draws < p  # [num_matrices, r]
            scales = clamp_to((s / p)[kept], u.dtype)
            counts.append(kept.sum(dim=1))
            factors += [(u.mT[kept] * scales[:, None]).reshape(-1), vh[kept].reshape(-1)]
        wire = scale_dtype(x.dtype)
        empty = x.new_empty(0)
        parts = {
            "counts": torch.cat([empty, *counts]).to(torch.int32),
            "factors": torch.cat([empty.to(wire), *factors]),
            "plain": plan.rest(padded),
        }
        return parts, state

    @property
    def fusion(self) -> SaturatingFeedback["Atomo"]:
        return SaturatingFeedback(self)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        plan = _make_layout(tensors_covering(spec.tensors, spec.numel), self.rank)
        num_matrices = [stack.num for stack in plan.stacks]
        counts = expect(parts["counts"], "counts", sum(num_matrices), torch.int32).long()
        plain = expect(parts["plain"], "plain", plan.num_plain, spec.dtype)
        factors = parts["factors"]
        by_stack = counts.split(num_matrices)
        sizes = []
        for stack, own in zip(plan.stacks, by_stack):
            if bool(((own < 0) | (own > min(stack.n, stack.m))).any()):
                raise WireError(
                    f"counts: expected 0 .. {min(stack.n, stack.m)} triples of a matrix "
                    f"{stack.n} x {stack.m}"
                )
            total = int(own.sum())
            sizes += [total * stack.n, total * stack.m]
        expect(factors, "factors", sum(sizes), scale_dtype(spec.dtype))
        if not bool(torch.isfinite(factors).all()):
            raise WireError("factors: NaN or infinity")
        pieces = factors.split(sizes)
        matrices = []
        for i, (stack, own) in enumerate(zip(plan.stacks, by_stack)):
            left = _pad_by_matrix(pieces[2 * i].view(-1, stack.n), own)
            right = _pad_by_matrix(pieces[2 * i + 1].view(-1, stack.m), own)
            # Sums of large products would be infinite, and their differences NaN.
            units = magnitude_unit(left), magnitude_unit(right)
            product = torch.bmm(left.mT / units[0], right / units[1])
            product = product.mul_(units[0]).mul_(units[1])
            matrices.append(clamp_to(product, spec.dtype))
        return plan.assemble(matrices, plain)[: spec.numel]


@lru_cache(maxsize=1024)
def _make_layout(tensors: tuple[Placed, ...], rank: int) -> Layout:
    """The layout of a vector, padded with zeros to a square; equal on both sides."""
    numel = tensors[-1][2]
    if len(tensors) == 1 and not tensors[0][0] and matrix_shape(tensors[0][3]) is None and numel:
        n = isqrt(numel - 1) + 1
        square = (n, -(-numel // n))
        if _shrinks(square, rank):
            tensors = (("", 0, square[0] * square[1], square),)
    return layout(tensors, [_shrinks(tensor[3], rank) for tensor in tensors])


def _shrinks(shape: Sequence[int], rank: int) -> bool:
    matrix = matrix_shape(shape)
    return matrix is not None and rank * sum(matrix) < matrix[0] * matrix[1]


def _decompose(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, the singular values in float64, and V^T of a stack of matrices."""
    scale = magnitude_unit(matrices)
    u, s, vh = torch.linalg.svd(matrices / scale, full_matrices=False)
    # The sign of a pair is arbitrary: we make the largest entry of u positive.
    largest = u.gather(-2, u.abs().argmax(dim=-2, keepdim=True))  # [num_matrices, 1, r]
    sign = torch.where(largest < 0, -1.0, 1.0).to(u.dtype)
    return u * sign, s.double() * scale.double(), vh * sign.mT


def _probabilities(singular: Tensor, rank: int) -> Tensor:
    """[num_matrices, r]: how often to keep each triple; singular values come in falling order."""
    tails = singular.flip(-1).cumsum(-1).flip(-1)  # of this and all smaller ones
    capped = torch.arange(singular.shape[-1], device=singular.device)
    left = (rank - capped).clamp(min=0)  # of the budget, if all larger ones are kept for certain
    # Number t is capped if it is due more than 1 after those before it were.
    certain = (left * singular >= tails).cummin(-1).values & (singular > 0)
    num_certain = certain.sum(dim=-1, keepdim=True)
    tail = tails.gather(-1, num_certain.clamp(max=singular.shape[-1] - 1))
    tail = tail.clamp(min=torch.finfo(tail.dtype).tiny)
    share = (rank - num_certain).clamp(min=0) * singular / tail
    return torch.where(certain, 1.0, share.clamp(max=1.0))


def _pad_by_matrix(rows: Tensor, counts: Tensor) -> Tensor:
    """[total, width], `counts` rows for each matrix, as [num_matrices, most, width] with zeros."""
    most = int(counts.max())
    slots = torch.arange(most, device=rows.device) < counts[:, None]
    out = rows.new_zeros(len(counts), most, rows.shape[1])
    out[slots] = rows
    return out
