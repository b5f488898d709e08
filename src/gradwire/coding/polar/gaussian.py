"""Test channels of a Gaussian source: 2^m points, and the ratios of each bit of a label.

A source code of rate R picks, for every element x ~ N(0, 1), one of M = 2^m points a_k; the channel
that it is designed for picks k with probability

    p(k | x)  ~  exp(-s (x - a_k)^2 + v_k)

where v makes all points equally likely (the inputs of a polar code are), s sets the mutual
information to R, and a_k = E(x | k). With enough points the mean squared error tends to Shannon's
4^-R (Cover and Thomas 2006, sec. 10.3). Labels are binary numbers in the order of the points, coded
bit by bit, least significant first (multilevel codes, Imai and Hirakawa 1977): of bit j

    log p(bit is 0 | x, lower bits) - log p(bit is 1 | x, lower bits)

is a function of x and the lower bits. For m = 1 it is -4 s a x, a straight line: bit 0 is the point
-a.
"""

import math
import zlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.coding.polar.channel import UNITS

_REACH = 4.5  # standard deviations; beyond, x is treated as if it were there
_BINS = 1 << 10
BINS_PER_DEVIATION = _BINS / (2 * _REACH)
_DRAWS = 1 << 16


@dataclass(frozen=True)
class GaussianChannel:
    """Points of unit variance sources, and ratios of each bit of their labels."""

    points: Tensor  # float32 [2^m], ascending
    slope: float  # m = 1: the ratio is -slope * x in units
    ratios: tuple[Tensor, ...]  # of bit j, int8 [2^j, _BINS]: by lower bits, by x
    # The ratios of bit j, right if positive: int8 [2^16], as in `channel.bsc_table`.
    channels: tuple[Tensor, ...]
    digest: int  # of `channels`, which codes are made of in integers, and of `points`

    @property
    def num_bits(self) -> int:
        return len(self.channels)


@dataclass(frozen=True)
class _Design:
    """The parameters that gave the least error for codes of 8192 positions."""

    limit: float  # up to this rate
    num_bits: int  # more points do not lower the error further
    rounds: int  # of the fit: points drift together, and stopping early may keep some apart
    excess: float = 1.0  # a low rate does better if designed for a little more


_DESIGNS = (
    _Design(0.6, 1, 60),
    _Design(0.9, 3, 1000, 1.03),
    _Design(1.25, 3, 40, 1.03),
    _Design(1.75, 5, 60, 1.03),
    _Design(2.25, 6, 60),
    _Design(4.0, 8, 60),
)


@lru_cache(maxsize=32)
def gaussian_channel(rate: float) -> GaussianChannel:
    """The channel that a code of `rate` bits per element is designed for."""
    design = next(design for design in _DESIGNS if rate <= design.limit)
    m = design.num_bits
    x = _grid()
    mass = torch.exp(-0.5 * x * x)
    mass /= mass.sum()
    points, log_p, slope = _fit_points(design.excess * rate, m, design.rounds, x, mass)
    labels = torch.arange(1 << m, device="cpu")
    ratios, channels = [], []
    for j in range(m):
        rows = []
        hits = torch.zeros(255, dtype=torch.float64, device="cpu")
        for lower in range(1 << j):
            zero, one = (
                torch.logsumexp(log_p[:, labels % (2 << j) == lower + (bit << j)], dim=1)
                for bit in (0, 1)
            )
            ratio = (UNITS * (zero - one)).round().clamp(-127, 127)
            # A ratio is right if the bit is zero; for a one its negative is.
            hits.index_add_(0, (ratio + 127).long(), mass * zero.exp())
            hits.index_add_(0, (127 - ratio).long(), mass * one.exp())
            rows.append(ratio.to(torch.int8))
        ratios.append(torch.stack(rows))
        channels.append(_draws(hits))
    digest = 0
    for table in (*channels, points.float()):
        digest = zlib.crc32(table.numpy().tobytes(), digest)
    return GaussianChannel(points.float(), slope, tuple(ratios), tuple(channels), digest)


def _grid() -> Tensor:
    return (torch.arange(_BINS, dtype=torch.float64, device="cpu") + 0.5) * (
        2 * _REACH / _BINS
    ) - _REACH


def _draws(hits: Tensor) -> Tensor:
    """2^16 ratios in proportion to how often each occurs."""
    edges = (hits.cumsum(0) / hits.sum() * _DRAWS).round().long()
    counts = torch.diff(edges, prepend=edges.new_zeros(1))
    return torch.repeat_interleave(torch.arange(-127, 128, dtype=torch.int8, device="cpu"), counts)


def _fit_points(
    rate: float, m: int, rounds: int, x: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Points, log p(k | x) on the grid, and 4 s a in units if there are two points."""
    num = 1 << m
    quantiles = (torch.arange(num, dtype=torch.float64, device="cpu") + 0.5) / num
    points = math.sqrt(2) * torch.erfinv(2 * quantiles - 1) * math.sqrt(1 - 4**-rate)
    weights = torch.zeros(num, dtype=torch.float64, device="cpu")
    log_s = math.log(0.5 * 4**rate)
    for _ in range(rounds):
        for _ in range(3):
            log_p = torch.log_softmax(-math.exp(log_s) * (x[:, None] - points) ** 2 + weights, 1)
            share = mass @ log_p.exp()
            weights = weights - 0.7 * (share * num).log()
        p = log_p.exp()
        information = float((mass[:, None] * p * (log_p - share.log())).sum()) / math.log(2)
        log_s += 0.5 * (rate - information)
        points = (mass * x) @ p / share
        points = (points - points.flip(0)) / 2  # symmetric but for rounding
    slope = 4 * math.exp(log_s) * float(points[-1]) * UNITS
    return points, log_p, slope
