"""Powers of two: as levels, and as exact factors that bring numbers into a range."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.core.codec import clamp_to


def num_levels(low: int, high: int) -> int:
    """Powers of two from 2^low to 2^high."""
    return high - low + 1


def powers(low: int, high: int, like: Tensor) -> Tensor:
    """0, 2^low ... 2^high, in the dtype and on the device of `like`, exactly."""
    levels = [0.0, *(2.0**exponent for exponent in range(low, high + 1))]
    return torch.tensor(levels, dtype=like.dtype, device=like.device)


@lru_cache(maxsize=64)
def powers_on(low: int, high: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`powers`, kept: nobody may change them."""
    return powers(low, high, torch.empty(0, dtype=dtype, device=device))


def largest_magnitude(x: Tensor) -> float:
    """NaN or infinity if and only if there is one in x."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


def times_power(x: Tensor, exponent: int) -> Tensor:
    """x times 2^exponent, where that may be beyond the range by itself."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)


def in_range(x: Tensor, low: int, high: int, largest: float | None = None) -> tuple[Tensor, int]:
    """x times 2^-e with a largest magnitude of 2^(low - 1) .. 2^high, and e: nearly always 0.

    Of all such e the smallest, so that small elements beside large ones keep their bits. `largest`
    is the largest magnitude of x, if it is known.
    """
    if largest is None:
        largest = largest_magnitude(x)
    exponent = math.frexp(largest or 2.0**low)[1]
    shift = exponent - min(max(exponent, low), high)
    return (times_power(x, -shift), shift) if shift else (x, 0)


def from_range(x: Tensor, shift: int, dtype: torch.dtype) -> Tensor:
    """x times 2^shift as `dtype`, saturated; x itself if that is it already, for it is finite."""
    if shift:
        x = times_power(x, shift)
    return clamp_to(x, dtype) if shift or x.dtype != dtype else x
