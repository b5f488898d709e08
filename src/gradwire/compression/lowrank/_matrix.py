"""What low-rank methods share: the matrices in a flat bucket, stacked by shape.

A tensor of shape [n, ...] is the matrix [n, m] of its rows, so a convolution's kernels are
[out, in * height * width] (Vogels et al. 2019, sec. 3). Matrices of equal shape are stacked, so
that one batched product serves them all.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.group import is_half
from gradwire.core.spec import Placed


class Stack(NamedTuple):
    """Matrices [n, m] of one shape, at these positions of the bucket."""

    n: int
    m: int
    starts: tuple[int, ...]

    @property
    def numel(self) -> int:
        return len(self.starts) * self.n * self.m

    def of(self, x: Tensor) -> Tensor:
        """[num_matrices, n, m]: the matrices in a flat vector; float32 at least."""
        size = self.n * self.m
        pieces = [x[start : start + size].view(self.n, self.m) for start in self.starts]
        stacked = pieces[0][None] if len(pieces) == 1 else torch.stack(pieces)
        return stacked.float() if is_half(x) else stacked

    def put(self, matrices: Tensor, x: Tensor) -> None:
        """The inverse of `of`, in place."""
        size = self.n * self.m
        for start, matrix in zip(self.starts, matrices):
            x[start : start + size].view(self.n, self.m).copy_(matrix)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """[n, m] of a tensor; None for scalars, vectors and what is empty."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    return shape[0], math.prod(shape[1:])


def stacks(tensors: Sequence[Placed]) -> tuple[Stack, ...]:
    """Tensors of at least two dimensions as matrices, stacked by shape in order of appearance."""
    starts: dict[tuple[int, int], list[int]] = {}
    for _, start, _, shape in tensors:
        key = matrix_shape(shape)
        assert key is not None
        starts.setdefault(key, []).append(start)
    return tuple(Stack(n, m, tuple(where)) for (n, m), where in starts.items())
