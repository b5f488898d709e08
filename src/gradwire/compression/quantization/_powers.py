"""What the natural compressors share: rounding at random to powers of two.

Level 0 is zero and level j is 2^(low + j - 1), up to 2^high. A symbol is the level with the sign
of the element, moved up so that the smallest one is 0.
"""

import torch
from torch import Tensor

from gradwire.compression.quantization._buckets import dither
from gradwire.core.key import Key


def num_levels(low: int, high: int) -> int:
    """Powers of two from 2^low to 2^high."""
    return high - low + 1


def round_to_powers(x: Tensor, low: int, high: int, key: Key) -> Tensor:
    """Symbols of the two levels around each element, drawn so that the mean is the element.

    What lies beyond 2^high goes there. int32 of 0 .. 2 num_levels.
    """
    mantissa, exponent = torch.frexp(x.abs())  # x = mantissa 2^exponent, mantissa in [1/2, 1)
    smallest = 2.0**low
    below = x.abs() < smallest
    fraction = torch.where(below, x.abs() / smallest, 2 * mantissa - 1)
    level = torch.where(below, torch.zeros_like(exponent), exponent - low)
    level = level + (dither(x.numel(), key, x) < fraction).to(level.dtype)
    level = level.clamp(max=num_levels(low, high))
    return torch.where(x < 0, -level, level).to(torch.int32) + num_levels(low, high)


def from_powers(symbols: Tensor, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """The numbers that the symbols stand for, exactly."""
    powers = [2.0**exponent for exponent in range(low, high + 1)]
    table = [-power for power in reversed(powers)] + [0.0] + powers
    return torch.tensor(table, dtype=dtype, device=symbols.device)[symbols.long()]
