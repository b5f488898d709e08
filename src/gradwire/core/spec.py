"""What a receiver knows about a tensor before a single byte of it arrives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

# Where one tensor lies in a flat vector: name, first element, end, shape. A plain tuple, so that
# a state can hold it.
Placed: TypeAlias = tuple[str, int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor; for symbols also the alphabet: integers 0 .. alphabet - 1."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    alphabet: int | None = None
    # The model's tensors in a flat bucket, where known. No byte depends on them unless a method
    # asks, so they are no part of what a spec is.
    tensors: tuple[Placed, ...] = field(default=(), compare=False)

    @staticmethod
    def of(x: Tensor) -> "Spec":
        return Spec(tuple(x.shape), x.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def flat(self) -> "Spec":
        """The same elements as a vector, which remembers the tensors in it."""
        return Spec((self.numel,), self.dtype, self.alphabet, self.layout)

    @property
    def layout(self) -> tuple[Placed, ...]:
        """The tensors in it: those of the bucket, or the tensor itself."""
        return self.tensors or (("", 0, self.numel, tuple(self.shape)),)


def runs(tensors: Sequence[Placed]) -> tuple[tuple[int, int], ...]:
    """(start, stop) of tensors in order, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for _, start, stop, _ in tensors:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
