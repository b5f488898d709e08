"""Sums over a whole vector, read back in one copy."""

import torch
from torch import Tensor

from gradwire.kernels.reference.moments import Tails
from gradwire.kernels.triton._sums import sums_of_moments, sums_of_tails


def moments(x: Tensor) -> tuple[float, float]:
    total, squares = sums_of_moments(_wide(x)).tolist()
    return total, squares


def tails(x: Tensor, threshold: float) -> Tails:
    above, below, outer, inner = sums_of_tails(_wide(x), threshold).tolist()
    return Tails(int(above), int(below), outer, inner)


def _wide(x: Tensor) -> Tensor:
    """The same numbers: the interpreter has no arithmetic of bfloat16."""
    return x.float() if x.dtype == torch.bfloat16 else x
