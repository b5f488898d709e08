"""Adaptive levels (Faghri et al. 2020, "Adaptive gradient quantization for data-parallel SGD").

QSGD whose levels 0 = l_0 < l_1 < ... < l_s = 1 are fitted to the magnitudes r = |v_i| / scale that
they round. Random rounding of r between neighbours costs (r - l_j)(l_{j+1} - r) of the squared
scale. In l_j alone, its neighbours a and c held, the sum of the costs is convex, and least where

    sum over a < r < l_j of (r - a)  =  sum over l_j < r < c of (c - r),

that is at a quantile of the r in between: coordinate descent (their ALQ) needs no step size.

Differences: they fit a truncated normal to the r of all ranks now and then; we fit the elements
sent, weighted by their squared scale (a sample of 16,384 of a longer vector), in every step, and
send the levels. They normalise by the Euclidean norm, we by the largest element. All odd levels
descend at once, then all even ones, since each depends on its neighbours only; the descent starts
at levels whose density is the cube root of that of r, the best one for many levels.

Unbiased for any levels. Levels between 0 and 1 never cost more than 0 and 1 alone, so the variance
of one level holds: sum r (1 - r) / sum r^2 with one r = 1 is at most (sqrt(b) - 1) / 2 in a bucket
of b, when all others are 1 / (1 + sqrt(b)). Real data is far better off, but no theorem says so.

Use it at 3 to 5 bits where `qsgd` errs too much and the fit in every step can be afforded, alone or
as `adaptive(4) >> rans`; it is unbiased, so it needs no `ef(...)`. `eden` errs less at the same
bits, at the price of a rotation, if unbiased in the limit of long blocks will do.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._packed import PackedCodec, finished, look_up, packing
from gradwire.compression.quantization._scales import (
    bucket_norm,
    check_bucket,
    mirrored,
    relative_to,
)
from gradwire.core.codec import Guarantee, Parts, expect, expect_scale, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_SAMPLE = 1 << 14  # elements that levels are fitted to
_SWEEPS = 10  # of the descent, which starts near its end
_KNOTS = 256  # quantiles from which the first guess is made


@dataclass(frozen=True, repr=False)
class Adaptive(PackedCodec):
    """Round at random to levels fitted to the data, which travel along."""

    bits: int  # per element: 2^(bits - 1) - 1 levels above zero
    bucket: int = 512  # elements that share one scale, their largest magnitude

    paper = "Faghri et al. 2020, Adaptive gradient quantization for data-parallel SGD"
    examples = ("adaptive(4)", "adaptive(3, bucket=64)")

    parts = ("levels", "scale", "values")

    def __post_init__(self) -> None:
        if not 3 <= self.bits <= 8:
            raise ValueError(
                f"adaptive: bits must lie in 3 .. 8, got {self.bits}; two bits have only the "
                "levels 0 and 1, as qsgd(bits=2)"
            )
        check_bucket("adaptive", "bucket", self.bucket)

    @property
    def num_levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def guarantee(self, spec: Spec) -> Guarantee:
        b = max(1, min(self.bucket, spec.numel))
        return Guarantee(omega=(math.sqrt(b) - 1) / 2)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2 * self.num_levels + 1)

    def pack(self, x: Tensor, key: Key) -> Parts:
        x = x.to(scale_dtype(x.dtype))
        scale = bucket_norm(x, self.bucket)
        inner = self._fitted(x, scale, key.child("sample"))
        draw, how = (key.seed, key.stream), packing(2 * self.num_levels + 1)
        levels = _with_ends(inner, x.dtype)
        packed = kernels.to_levels(x, scale, self.bucket, levels, draw, how)
        return {"levels": inner, "scale": scale, "values": packed}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype = scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], num_buckets(spec.numel, self.bucket), dtype)
        inner = expect(parts["levels"], "levels", self.num_levels - 1, torch.float32)
        levels = _with_ends(inner, dtype)
        if not bool((levels[1:] >= levels[:-1]).all()):  # false for NaN too
            raise WireError("levels: they must ascend from 0 to 1")
        table = mirrored(levels)
        return finished(look_up(parts["values"], table, scale, self.bucket, spec.numel), spec.dtype)

    def _fitted(self, x: Tensor, scale: Tensor, key: Key) -> Tensor:
        """l_1 .. l_(s-1) for a sample of x, as they travel."""
        chosen = _sample(x.numel(), key, x.device)
        own = scale[chosen // self.bucket]
        weight = own.double() / scale.max().clamp(min=torch.finfo(x.dtype).tiny) if len(x) else own
        magnitude = relative_to(x[chosen].reshape(-1, 1), own).reshape(-1).abs()
        return fitted_levels(magnitude.double(), weight.square(), self.num_levels).float()


def fitted_levels(magnitude: Tensor, weight: Tensor, num_levels: int) -> Tensor:
    """l_1 .. l_(s-1), float64, for magnitudes in 0 .. 1 (float64, at least one weight positive)."""
    r, order = magnitude.sort()
    count = torch.cat([r.new_zeros(1), weight[order].cumsum(0)])  # weight of the first i
    total = torch.cat([r.new_zeros(1), (weight[order] * r).cumsum(0)])
    if not bool(count[-1] > 0):
        return torch.arange(1, num_levels, dtype=torch.float64, device=r.device) / num_levels
    levels = _first_guess(r, count, num_levels)
    odd, even = (torch.arange(i, num_levels, 2, device=r.device) for i in (1, 2))
    for _ in range(_SWEEPS):
        for j in (odd, even):
            a, c = levels[j - 1], levels[j + 1]
            first, last = (torch.searchsorted(r, edge.contiguous(), right=True) for edge in (a, c))
            # How much weight lies between a and the new l_j, from the condition above.
            share = c * (count[last] - count[first]) - (total[last] - total[first])
            share = share / torch.where(c > a, c - a, torch.ones_like(a))
            best = torch.searchsorted(count[1:], count[first] + share).clamp(max=len(r) - 1)
            levels[j] = torch.minimum(torch.maximum(r[best], a), c)
    return levels[1:-1]


def _first_guess(r: Tensor, count: Tensor, num_levels: int) -> Tensor:
    """0, levels with the cube root of the density of r, 1.

    Between two of K quantiles, `gap` apart, the density is 1 / (K gap): its cube root times the
    gap is proportional to gap^(2/3).
    """
    parts = torch.linspace(0, 1, _KNOTS + 1, dtype=torch.float64, device=r.device)
    knots = r[torch.searchsorted(count[1:], parts * count[-1]).clamp(max=len(r) - 1)]
    knots[0], knots[-1] = 0.0, 1.0
    mass = (knots[1:] - knots[:-1]).pow(2 / 3)
    reached = torch.cat([mass.new_zeros(1), mass.cumsum(0)])
    wanted = reached[-1] * torch.arange(num_levels + 1, device=r.device) / num_levels
    gap = (torch.searchsorted(reached, wanted, right=True) - 1).clamp(0, _KNOTS - 1)
    fraction = ((wanted - reached[gap]) / mass[gap].clamp(min=1e-300)).clamp(0, 1)
    levels = knots[gap] + fraction * (knots[gap + 1] - knots[gap])
    levels[0], levels[-1] = 0.0, 1.0
    return levels


def _sample(numel: int, key: Key, device: torch.device) -> Tensor:
    """Positions of all elements, or one at random from each of many equal stretches."""
    stretch = -(-numel // _SAMPLE)
    if stretch <= 1:
        return torch.arange(numel, device=device)
    starts = torch.arange(0, numel - stretch + 1, stretch, device=device)
    return starts + key.integers(len(starts), stretch, device)


def _with_ends(inner: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)]).to(dtype)
