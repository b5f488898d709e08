"""Test channels, which turn the reconstruction into the source.

A source code of rate R for bits is designed for the channel BSC(D) with 1 - h2(D) = R. Ratios are
integers, eight units to a nat, as in `kernels.polar_quantise`. A channel is given by the
log-likelihood ratios of its input bit: a table of 2^16 equally likely ratios, positive where they
are right.
"""

import math
import zlib
from functools import lru_cache

import torch
from torch import Tensor

UNITS = 8  # per nat
CERTAIN = 127  # the ratio of a position that is known to be zero
_DRAWS = 1 << 16


def binary_entropy(p: float) -> float:
    """h2, in bits."""
    if p <= 0 or p >= 1:
        return 0.0
    return -p * math.log2(p) - (1 - p) * math.log2(1 - p)


@lru_cache
def distortion_bound(rate: float) -> float:
    """Shannon's D(R) of uniform bits under Hamming distortion: 1 - h2(D) = R."""
    low, high = 0.0, 0.5
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - binary_entropy(middle) > rate else (low, middle)
    return (low + high) / 2


def bsc_ratio(distortion: float) -> int:
    """The ratio of one position: log((1 - D) / D), as far as int8 reaches."""
    return max(1, round(UNITS * bsc_ratio_nats(distortion)))


def bsc_ratio_nats(distortion: float) -> float:
    """The same, not rounded."""
    if distortion <= 0:
        return 127 / UNITS
    return min(127 / UNITS, math.log((1 - distortion) / distortion))


@lru_cache
def bsc_digest(rate: float) -> int:
    """Of the table that codes of this rate are made of."""
    return zlib.crc32(bsc_table(distortion_bound(rate)).numpy().tobytes())


def bsc_table(distortion: float) -> Tensor:
    """The channel BSC(D), int8 [2^16]."""
    table = torch.full((_DRAWS,), bsc_ratio(distortion), dtype=torch.int8, device="cpu")
    table[: round(_DRAWS * distortion)] *= -1
    return table


def to_units(llr: Tensor) -> Tensor:
    """Nats as the kernels' integers, int8."""
    return (llr * UNITS).round().clamp(-CERTAIN, CERTAIN).to(torch.int8)
