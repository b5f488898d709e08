"""What a receiver knows about a tensor before a single byte of it arrives."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of a tensor; for symbols also the alphabet: integers 0 .. alphabet - 1."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    alphabet: int | None = None

    @staticmethod
    def of(x: Tensor) -> "Spec":
        return Spec(tuple(x.shape), x.dtype)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def flat(self) -> "Spec":
        return Spec((self.numel,), self.dtype, self.alphabet)
