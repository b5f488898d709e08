"""What the natural compressors share: levels that are powers of two."""

import torch
from torch import Tensor


def num_levels(low: int, high: int) -> int:
    """Powers of two from 2^low to 2^high."""
    return high - low + 1


def powers(low: int, high: int, like: Tensor) -> Tensor:
    """0, 2^low ... 2^high, in the dtype and on the device of `like`, exactly."""
    levels = [0.0, *(2.0**exponent for exponent in range(low, high + 1))]
    return torch.tensor(levels, dtype=like.dtype, device=like.device)
