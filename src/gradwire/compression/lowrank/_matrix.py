"""The matrices in a flat bucket, stacked by shape, for methods that work on layers.

A tensor of shape [n, ...] is the matrix [n, m] of its rows, so a convolution's kernels are
[out, in * height * width] (Vogels et al. 2019). Small matrices of equal shape are stacked, so
that one batched product serves them all; large ones stay where they are in the bucket, each a
stack by itself: copying them takes longer than a call.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.codec import State
from gradwire.core.group import is_half
from gradwire.core.spec import Placed

_LARGE = 1 << 16  # elements

StackKey = tuple[int, int, int | None]


class Stack(NamedTuple):
    """Matrices [n, m] of one shape: which pieces of the bucket they are."""

    n: int
    m: int
    pieces: tuple[int, ...]

    @property
    def num(self) -> int:
        return len(self.pieces)


class Layout(NamedTuple):
    """A bucket as a sequence of pieces: matrices, and other elements. Equal on all ranks.

    A bucket is cut by one `split` and put together by one `cat`, however many layers it has.
    """

    stacks: tuple[Stack, ...]
    plain: tuple[int, ...]  # the pieces that are no matrices
    sizes: tuple[int, ...]  # of all pieces, in the order of the bucket
    # Where to find each piece if those of all stacks come first, then the plain ones.
    order: tuple[int, ...]

    @property
    def numel(self) -> int:
        return sum(self.sizes)

    @property
    def num_plain(self) -> int:
        return sum(self.sizes[piece] for piece in self.plain)

    def matrices(self, x: Tensor) -> list[Tensor]:
        """[num_matrices, n, m] of each stack, in float32 at least; a view where it can be one."""
        pieces = x.split(self.sizes)
        return [
            _widen(_concatenate(pieces, s.pieces, x)).view(s.num, s.n, s.m) for s in self.stacks
        ]

    def rest(self, x: Tensor) -> Tensor:
        """The elements outside all matrices, concatenated."""
        return _concatenate(x.split(self.sizes), self.plain, x)

    def places(self, bucket: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
        """Where in the bucket the matrix of a stack [1, n, m] lies; None if there are several, or
        if it has another dtype."""
        if bucket.dtype != dtype:
            return [None] * len(self.stacks)
        pieces = bucket.split(self.sizes)
        return [pieces[s.pieces[0]].view(1, s.n, s.m) if s.num == 1 else None for s in self.stacks]

    def put(self, bucket: Tensor, stack: int, matrices: Tensor) -> None:
        """Copies the matrices of a stack [num_matrices, n, m] to where they belong."""
        pieces = bucket.split(self.sizes)
        for piece, matrix in zip(self.stacks[stack].pieces, matrices):
            pieces[piece].copy_(matrix.reshape(-1))

    def put_rest(self, bucket: Tensor, rest: Tensor) -> None:
        """Copies the elements outside all matrices to where they belong."""
        pieces = bucket.split(self.sizes)
        own = rest.split([self.sizes[piece] for piece in self.plain])
        for piece, values in zip(self.plain, own):
            pieces[piece].copy_(values)

    def assemble(self, matrices: Sequence[Tensor], rest: Tensor) -> Tensor:
        """The flat bucket of these matrices and this rest."""
        pieces = [row for stack in matrices for row in stack.reshape(len(stack), -1).unbind()]
        pieces += rest.split([self.sizes[piece] for piece in self.plain])
        return _concatenate(pieces, self.order, rest)


def layout(tensors: Sequence[Placed], compressed: Sequence[bool]) -> Layout:
    """Tensors in a row; those to be compressed become matrices, stacked in order of appearance."""
    shapes: dict[StackKey, list[int]] = {}
    plain: list[int] = []
    sizes: list[int] = []
    for (_, start, stop, shape), chosen in zip(tensors, compressed, strict=True):
        if chosen:
            key = matrix_shape(shape)
            assert key is not None
            shapes.setdefault(stack_key(key, len(sizes)), []).append(len(sizes))
        elif plain and plain[-1] == len(sizes) - 1:
            sizes[-1] += stop - start  # neighbours are one piece
            continue
        else:
            plain.append(len(sizes))
        sizes.append(stop - start)
    stacks = tuple(Stack(n, m, tuple(pieces)) for (n, m, _), pieces in shapes.items())
    found = [piece for stack in stacks for piece in stack.pieces] + plain
    order = sorted(range(len(found)), key=found.__getitem__)
    return Layout(stacks, tuple(plain), tuple(sizes), tuple(order))


def stack_key(shape: tuple[int, int], number: int) -> StackKey:
    """Matrices with the same key are stacked. `number`: of the matrix, another one for each."""
    return (*shape, number if shape[0] * shape[1] >= _LARGE else None)


def kept_tensors(state: State) -> tuple[Placed, ...]:
    """The tensors of a bucket in the state of a codec that keeps nothing else."""
    return state or ()


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """[n, m] of a tensor; None for scalars, vectors and what is empty."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    return shape[0], math.prod(shape[1:])


def magnitude_unit(x: Tensor) -> Tensor:
    """A power of two no more than twice as large as the largest magnitude, 1 for zeros."""
    if not x.numel():
        return x.new_ones(())
    exponent = torch.frexp(x.abs().max()).exponent
    return torch.ldexp(torch.ones_like(exponent, dtype=x.dtype), exponent - 1)


def _concatenate(pieces: Sequence[Tensor], which: Sequence[int], like: Tensor) -> Tensor:
    if len(which) == 1:
        return pieces[which[0]]
    return torch.cat([pieces[piece] for piece in which]) if which else like[:0]


def _widen(x: Tensor) -> Tensor:
    return x.float() if is_half(x) else x
