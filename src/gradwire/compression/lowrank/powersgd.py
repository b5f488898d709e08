"""PowerSGD: one power iteration to the best rank-r matrix (Vogels et al. 2019, Alg. 1).

    P <- mean of M Q;   P <- orthonormal(P);   Q <- mean of M^T P;   result P Q^T

for the matrix M [n, m] of each worker: r(n + m) numbers travel instead of nm, and both rounds are
plain all-reduces, because both factors are linear in M. Q is kept for the next step (warm start),
so that the steps together are a power iteration; the first one is drawn from the shared key. All
matrices of a bucket share the two messages; vectors, and matrices that would not shrink by
`min_rate`, travel as they are with the first.

Under error feedback the residual is the part of this worker's matrix that the mean lacks: its
corrected matrix minus P (M^T P)^T, its own term of the mean. torch's hook subtracts the mean P Q^T
instead. Both rounds are linear, so the updates are the same up to rounding; but there the distance
of a worker's gradients from the mean piles up in its residual with every step.

Where we differ: P is made orthonormal by a QR decomposition (the paper's Gram-Schmidt spans the
same space), which leaves no NaN behind if M has a rank below r. torch's hook also makes Q
orthonormal before each step; that changes no span, so no result. A warm Q is as large as M, hence
M Q as M squared, and a decomposition adds up squares. So factors beyond 2^40 or below 2^-40 are
divided by a power of two first, which changes no span either.

Use it as `ef(powersgd(2))` for networks of large matrices (linear, convolution, attention) and for
many workers, since its messages add up on the way. Where the gradient is a few large elements
rather than low-rank, or the parameters are vectors, take `ef(topk(0.01))`.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.lowrank._matrix import (
    Layout,
    StackKey,
    layout,
    matrix_shape,
    stack_key,
)
from gradwire.core.codec import Compression, State, check_input, clamp_to, corrected, is_finite
from gradwire.core.errors import GradwireWarning
from gradwire.core.group import Group, is_half
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Placed, Spec

_MOST_EXPONENT = 40  # of a factor, either way


@dataclass(frozen=True, repr=False)
class PowerSGD(Reducer):
    """Send two thin factors of each layer's matrix, found by one step of a power iteration."""

    rank: int
    min_rate: float = 2.0  # tensors that would not get smaller by more than this stay as they are
    warm_start: bool = True  # begin with the last step's Q, not with a random one

    paper = "Vogels et al. 2019, PowerSGD: Practical low-rank gradient compression"
    examples = ("powersgd(2)", "powersgd(4, min_rate=1.0)", "powersgd(1, warm_start=False)")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: rank must be at least 1, got {self.rank}. Try 2 or 4.")
        if not self.min_rate >= 0:
            raise ValueError(
                f"powersgd: min_rate is the least worthwhile compression ratio of a tensor and "
                f"must not be negative, got {self.min_rate}. Try 2."
            )

    @property
    def averages_exactly(self) -> bool:
        return True

    def unfed(self, spec: Spec) -> Compression | None:
        return self

    def init(self, spec: Spec, size: int) -> State:
        if not spec.tensors and matrix_shape(spec.shape) is None and spec.numel > 1:
            warnings.warn(
                f"{self!r}: a vector of {spec.numel} elements without the shapes of the tensors "
                "in it is sent uncompressed. Give the tensors in Spec(..., tensors=...).",
                GradwireWarning,
                stacklevel=2,
            )
        return {"tensors": spec.layout, "q": None}

    def of_tensors(self, state: State) -> dict[str, Tensor]:
        """The factor Q of each matrix: the next step begins with it."""
        plan = _make_plan(state["tensors"], self.rank, self.min_rate)
        if state["q"] is None or state["q"].numel() != sum(plan.numbers[1]):
            return {}
        stacks = zip(state["q"].split(plan.numbers[1]), _stacked_names(self, state["tensors"]))
        return {
            name: piece
            for factors, names in stacks
            for name, piece in zip(names, factors.chunk(len(names)))
        }

    def with_tensors(self, state: State, values: Mapping[str, Tensor]) -> State:
        names = [name for stack in _stacked_names(self, state["tensors"]) for name in stack]
        if not names or not values.keys() >= set(names):
            return state
        return {**state, "q": torch.cat([values[name] for name in names])}

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        node, spec = group.node, Spec.of(x)
        plan = _make_plan(state["tensors"], self.rank, self.min_rate)
        flat = await node.call(_correct_input, self, x, residual)
        q = state["q"]
        if q is None or q.numel() != sum(plan.numbers[1]):  # a rank may change with time
            q = await node.share(
                _random_factors, plan, key.shared().child("q"), spec.dtype, x.device
            )
        matrices, left = await node.call(_left_factors, plan, flat, q)
        first = await group.mean(left)
        if plan.ranks:
            basis = await node.share(_orthonormalize, plan, first)
            right = await node.call(_right_factors, matrices, basis, flat)
            new_q = await group.mean(right)
        else:
            basis, right, new_q = (), left[:0], left[:0]
        mean = await node.share(_assemble, plan, spec, first, basis, new_q)
        own = partial(_assemble, plan, spec, left, basis, right)
        return Reduced(
            mean,
            own,
            {**state, "q": new_q if self.warm_start else None},
            None
            if residual is None
            else await node.call(_residual, plan, flat.view(spec.shape), matrices, basis, right),
        )


def _correct_input(codec: PowerSGD, x: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None or is_half(x):
        flat = corrected(x, residual).reshape(-1)
    else:  # in memory that is used again
        flat = kernels.empty(x.numel(), x.dtype, x.device)
        torch.add(x.detach().reshape(-1), residual.to(x.device).reshape(-1), out=flat)
    check_input(codec, flat)
    return flat


class _FactorPlan(NamedTuple):
    """The factors of a bucket; equal on all ranks."""

    layout: Layout
    ranks: tuple[int, ...]  # of each stack
    numbers: tuple[tuple[int, ...], tuple[int, ...]]  # in the factors P and Q of each stack

    def factors(self, message: Tensor, side: int) -> list[Tensor]:
        """The factors P (side 0) or Q (1) [num_matrices, n or m, rank] at the front of a message.

        In float32 at least.
        """
        sizes = self.numbers[side]
        pieces = message[: sum(sizes)].to(torch.promote_types(message.dtype, torch.float32))
        return [
            piece.view(stack.num, -1, rank)
            for piece, stack, rank in zip(pieces.split(sizes), self.layout.stacks, self.ranks)
        ]


def _stacked_names(codec: PowerSGD, tensors: tuple[Placed, ...]) -> list[list[str]]:
    """The names of the matrices in each stack."""
    stacks: dict[StackKey, list[str]] = {}
    for number, (name, _, _, shape) in enumerate(tensors):
        matrix = matrix_shape(shape)
        if matrix is not None and _shrinks(shape, codec.rank, codec.min_rate):
            stacks.setdefault(stack_key(matrix, number), []).append(name)
    return list(stacks.values())


@lru_cache(maxsize=1024)
def _make_plan(tensors: tuple[Placed, ...], rank: int, min_rate: float) -> _FactorPlan:
    bucket = layout(tensors, [_shrinks(tensor[3], rank, min_rate) for tensor in tensors])
    stacks = bucket.stacks
    ranks = tuple(min(rank, stack.n, stack.m) for stack in stacks)
    left = tuple(stack.num * stack.n * r for stack, r in zip(stacks, ranks))
    right = tuple(stack.num * stack.m * r for stack, r in zip(stacks, ranks))
    return _FactorPlan(bucket, ranks, (left, right))


def _shrinks(shape: Sequence[int], rank: int, min_rate: float) -> bool:
    """The rule of torch's hook: by more than `min_rate` times."""
    matrix = matrix_shape(shape)
    return matrix is not None and sum(matrix) * min(rank, *matrix) * min_rate < math.prod(matrix)


def _random_factors(
    plan: _FactorPlan, key: Key, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The first Q of every stack, as it would travel."""
    return key.normal(sum(plan.numbers[1]), device).to(dtype)


def _left_factors(plan: _FactorPlan, x: Tensor, q: Tensor) -> tuple[list[Tensor], Tensor]:
    """The matrices, and the first message: every P, then what is not compressed."""
    matrices = plan.layout.matrices(x)
    starts = map(_rescale, plan.factors(q.to(x.device), 1))
    products = [_times(m, q) for m, q in zip(matrices, starts)]
    return matrices, torch.cat([_flatten(products, x), plan.layout.rest(x)])


def _rescale(factor: Tensor) -> Tensor:
    """Factors, [num_matrices, n or m, rank], each over a power of two if far from 1."""
    exponents = torch.frexp(factor.abs().amax(dim=(1, 2), keepdim=True)).exponent
    is_far = exponents.abs() > _MOST_EXPONENT
    if not bool(is_far.any()):
        return factor
    # To a norm of about 1, so that no sum of products is larger than a row of M.
    norm = exponents + (factor.shape[1] * factor.shape[2]).bit_length() // 2
    shift = torch.where(is_far, -norm, torch.zeros_like(norm))
    half = shift // 2  # 2^shift may be beyond the range by itself
    return torch.ldexp(torch.ldexp(factor, half), shift - half)


def _orthonormalize(plan: _FactorPlan, first: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.linalg.qr(_rescale(p)).Q for p in plan.factors(first, 0))


def _right_factors(matrices: Sequence[Tensor], basis: Sequence[Tensor], like: Tensor) -> Tensor:
    """The second message: every Q."""
    return _flatten([_times(m.mT, p) for m, p in zip(matrices, basis)], like)


def _times(matrices: Tensor, factors: Tensor) -> Tensor:
    """[num, n, m] times [num, m, rank].

    As (Q^T M^T)^T: on CPUs M^T Q takes up to 70 times longer where the rows of M are contiguous.
    """
    return torch.bmm(factors.mT.contiguous(), matrices.mT).mT


def _flatten(products: Sequence[Tensor], like: Tensor) -> Tensor:
    if not products:
        return like[:0]
    return clamp_to(torch.cat([product.reshape(-1) for product in products]), like.dtype)


def _assemble(
    plan: _FactorPlan, spec: Spec, first: Tensor, basis: Sequence[Tensor], second: Tensor
) -> Tensor:
    """The tensor that the two messages describe."""
    where = plan.layout
    whole = kernels.empty(where.numel, spec.dtype, first.device)
    factors = plan.factors(second, 1)
    places = where.places(whole, factors[0].dtype) if factors else []
    for number, (p, q, place) in enumerate(zip(basis, factors, places)):
        product = torch.bmm(p, q.mT, out=place)
        if _may_overflow(p, q, spec.dtype):
            product = clamp_to(product, spec.dtype)
        if product is not place:
            where.put(whole, number, product)
    where.put_rest(whole, first[first.numel() - where.num_plain :])
    return whole.reshape(spec.shape)


def _may_overflow(p: Tensor, q: Tensor, dtype: torch.dtype) -> bool:
    """Whether an element of P Q^T may be too large for the dtype.

    On accelerators the answer is yes: to clamp takes less time there than to look at the factors.
    """
    if not p.is_cpu:
        return True
    most = p.shape[-1] * float(p.abs().max()) * float(q.abs().max())
    return not most < torch.finfo(dtype).max / 2  # sums are rounded


def _residual(
    plan: _FactorPlan,
    flat: Tensor,
    matrices: Sequence[Tensor],
    basis: Sequence[Tensor],
    second: Tensor,
) -> Tensor:
    """What was lost of `flat`: M - P (M^T P)^T, and nothing of the rest."""
    where = plan.layout
    whole = kernels.empty(where.numel, flat.dtype, flat.device)
    factors = plan.factors(second, 1)
    places = where.places(whole, factors[0].dtype) if factors else []
    for number, (m, p, q, place) in enumerate(zip(matrices, basis, factors, places)):
        lost = torch.baddbmm(m, p, q.mT, alpha=-1, out=place)
        if lost.dtype != flat.dtype or not lost.is_cpu or not is_finite(lost):
            lost = clamp_to(lost, flat.dtype)
        if lost is not place:
            where.put(whole, number, lost)
    where.put_rest(whole, whole.new_zeros(where.num_plain))
    return whole.reshape(flat.shape)
