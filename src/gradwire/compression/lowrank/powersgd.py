"""PowerSGD: one power iteration to the best rank-r matrix (Vogels et al. 2019, Alg. 1).

    P <- mean of M Q;   P <- orthonormal(P);   Q <- mean of M^T P;   result P Q^T

for the matrix M [n, m] of each worker: r(n + m) numbers travel instead of nm, and both rounds are
plain all-reduces, because both factors are linear in M. Q is kept for the next step (warm start),
so that the steps together are a power iteration; the first one is drawn from the shared key. All
matrices of a bucket share the two messages; vectors, and matrices that would not shrink by
`min_rate`, travel as they are with the first.

Under error feedback the residual is what the group did not hear of this worker: its corrected
matrix less P (M^T P)^T, its own term of the mean. torch's hook subtracts the mean P Q^T instead.
Both rounds are linear, so the updates are the same up to rounding; but there the distance of a
worker's gradients from the mean piles up in its residual with every step.

Where we differ: P is made orthonormal by a QR decomposition (the paper's Gram-Schmidt spans the
same space), which leaves no NaN behind if M has a rank below r. torch's hook also makes Q
orthonormal before each step; that changes no span, so no result.

Use it as `ef(powersgd(2))` for networks of large matrices (linear, convolution, attention) and for
many workers, since its messages add up on the way. Where the gradient is a few large elements
rather than low-rank, or the parameters are vectors, take `ef(topk(0.01))`.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.compression.lowrank._matrix import Stack, matrix_shape, stacks
from gradwire.compression.quantization._buckets import clamp_to
from gradwire.core.codec import State
from gradwire.core.errors import GradwireWarning
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.reducer import Reduced, Reducer, corrected
from gradwire.core.spec import Placed, Spec, runs


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

    def init(self, spec: Spec, size: int) -> State:
        if not spec.tensors and matrix_shape(spec.shape) is None and spec.numel > 1:
            warnings.warn(
                f"{self!r}: a vector of {spec.numel} elements without the shapes of the tensors "
                "in it is sent uncompressed. Give the tensors in Spec(..., tensors=...).",
                GradwireWarning,
                stacklevel=2,
            )
        return {"tensors": spec.layout, "q": None}

    async def mean(
        self, x: Tensor, state: State, key: Key, group: Group, residual: Tensor | None = None
    ) -> Reduced:
        node, spec = group.node, Spec.of(x)
        plan = _plan(state["tensors"], self.rank, self.min_rate)
        flat = corrected(x, residual).reshape(-1)
        q = state["q"]
        if q is None:
            q = await node.share(_random, plan, key.shared().child("q"), spec.dtype, x.device)
        left = await node.call(_left, plan, flat, q)
        heard = await group.mean(left)
        if plan.matrices:
            basis = await node.share(_orthonormal, plan, heard)
            right = await node.call(_right, plan, flat, basis)
            new_q = await group.mean(right)
        else:
            basis, right, new_q = (), left[:0], left[:0]
        mean = await node.share(_assembled, plan, spec, heard, basis, new_q)
        own = partial(_assembled, plan, spec, left, basis, right)
        return Reduced(
            mean,
            own,
            {**state, "q": new_q if self.warm_start else None},
            None if residual is None else await node.call(_lost, flat, own),
        )


class _Plan(NamedTuple):
    """What becomes of a bucket; all ranks hold the same."""

    matrices: tuple[Stack, ...]
    ranks: tuple[int, ...]  # of each stack
    plain: tuple[tuple[int, int], ...]  # (start, stop) of what is not compressed

    def factors(self, message: Tensor, side: str) -> list[Tensor]:
        """The factors [num_matrices, n or m, rank] at the front of a message, in float32."""
        shapes = [
            (len(stack.starts), stack.n if side == "p" else stack.m, rank)
            for stack, rank in zip(self.matrices, self.ranks)
        ]
        sizes = [count * length * rank for count, length, rank in shapes]
        pieces = message[: sum(sizes)].split(sizes)
        wide = torch.promote_types(message.dtype, torch.float32)
        return [piece.view(shape).to(wide) for piece, shape in zip(pieces, shapes)]


@lru_cache(maxsize=1024)
def _plan(tensors: tuple[Placed, ...], rank: int, min_rate: float) -> _Plan:
    compressed: list[Placed] = []
    plain: list[Placed] = []
    for tensor in tensors:
        shape = matrix_shape(tensor[3])
        # The rule of torch's hook: more than `min_rate` times fewer numbers.
        worth = shape and sum(shape) * min(rank, *shape) * min_rate < shape[0] * shape[1]
        (compressed if worth else plain).append(tensor)
    matrices = stacks(compressed)
    return _Plan(matrices, tuple(min(rank, s.n, s.m) for s in matrices), runs(plain))


def _random(plan: _Plan, key: Key, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The first Q of every stack, as it would travel."""
    sizes = [len(s.starts) * s.m * rank for s, rank in zip(plan.matrices, plan.ranks)]
    return key.normal(sum(sizes), device).to(dtype)


def _left(plan: _Plan, x: Tensor, q: Tensor) -> Tensor:
    """The first message: every P, then what is not compressed."""
    right = plan.factors(q.to(x.device), "q")
    products = [torch.bmm(stack.of(x), factor) for stack, factor in zip(plan.matrices, right)]
    return torch.cat([_flat(products, x), *(x[start:stop] for start, stop in plan.plain)])


def _orthonormal(plan: _Plan, heard: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.linalg.qr(p).Q for p in plan.factors(heard, "p"))


def _right(plan: _Plan, x: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """The second message: every Q."""
    products = [torch.bmm(stack.of(x).mT, p) for stack, p in zip(plan.matrices, basis)]
    return _flat(products, x)


def _flat(products: Sequence[Tensor], like: Tensor) -> Tensor:
    if not products:
        return like[:0]
    return clamp_to(torch.cat([product.reshape(-1) for product in products]), like.dtype)


def _assembled(
    plan: _Plan, spec: Spec, first: Tensor, basis: Sequence[Tensor], second: Tensor
) -> Tensor:
    """The tensor that the two messages describe."""
    out = first.new_empty(spec.numel)
    for stack, p, q in zip(plan.matrices, basis, plan.factors(second, "q")):
        stack.put(clamp_to(torch.bmm(p, q.mT), spec.dtype), out)
    position = first.numel() - sum(stop - start for start, stop in plan.plain)
    for start, stop in plan.plain:
        out[start:stop] = first[position : position + stop - start]
        position += stop - start
    return out.reshape(spec.shape)


def _lost(flat: Tensor, own: Callable[[], Tensor]) -> Tensor:
    heard = own()
    return corrected(flat, -heard.reshape(-1)).reshape(heard.shape)
