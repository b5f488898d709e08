"""Stochastic rotated quantisation (Suresh et al. 2017, "Distributed mean estimation with limited
communication").

Rotate at random, y = R x; then round each coordinate at random to one of k = 2^bits levels that
divide [min y, max y] evenly, up or down so that the mean is right; rotate back. Each rotated block
has its own minimum and maximum, which travel as floats.

Unbiased for every rotation, as rounding is. In a block of n the squared error is at most
n (max - min)^2 / (4 (k - 1)^2), which is n |x|^2 / (2 (k - 1)^2) at worst. In expectation over the
rotation max^2 and min^2 are at most (2 ln n + 2) |x|^2 / n, since a coordinate is a sum of elements
under random signs: hence omega = (2 ln n + 2) / (k - 1)^2 (their bound).

Use it at 4 bits and more, without `ef(...)`, where the mean must be exactly right and the variance
bounded for any data, spikes included. `eden` errs much less at the same bits, if unbiased in the
limit of long blocks will do.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._packed import PackedCodec, look_up, packing
from gradwire.compression.quantization._powers import from_range
from gradwire.compression.quantization._rotation import (
    check_block,
    rotatable,
    rotate,
    row_length,
    unrotate,
)
from gradwire.core.codec import Guarantee, Parts, expect, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class SRQ(PackedCodec):
    """Rotate at random, then round at random between the extremes of a block."""

    bits: int  # per element: 2^bits levels
    block: int = 4096  # elements rotated together, with one minimum and maximum

    paper = "Suresh et al. 2017, Distributed mean estimation with limited communication"
    examples = ("srq(2)", "srq(1, block=64)", "srq(4)")

    parts = ("low", "high", "values")

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 16:
            raise ValueError(f"srq: bits must lie in 1 .. 16, got {self.bits}")
        check_block("srq", self.block)

    def guarantee(self, spec: Spec) -> Guarantee:
        n, steps = row_length(spec.numel, self.block), 2**self.bits - 1
        return Guarantee(omega=min(n / 2, 2 * math.log(n) + 2) / steps**2)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2**self.bits)

    def pack(self, x: Tensor, key: Key) -> Parts:
        m, steps = row_length(x.numel(), self.block), 2**self.bits - 1
        x, shift = rotatable(x)
        y = rotate(x, key, self.block)
        low, high = kernels.bucket_extremes(y, m)
        draw, how = (key.seed, key.stream), packing(2**self.bits)
        packed = kernels.to_whole(y, _step(low, high, steps), low, m, 0, steps, draw, how)
        low, high = (from_range(end, shift, y.dtype) for end in (low, high))
        return {"low": low, "high": high, "values": packed}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype, m = scale_dtype(spec.dtype), row_length(spec.numel, self.block)
        low, high = (
            expect(parts[name], name, num_buckets(spec.numel, m), dtype) for name in ("low", "high")
        )
        if not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
            raise WireError("low, high: not finite or out of order")
        (low, high), shift = rotatable(torch.stack([low, high]))
        step = _step(low, high, 2**self.bits - 1)
        table = torch.arange(2**self.bits, dtype=dtype, device=step.device)
        y = look_up(parts["values"], table, step, m, spec.numel, start=low)
        return from_range(unrotate(y, key, self.block), shift, spec.dtype)


def _step(low: Tensor, high: Tensor, steps: int) -> Tensor:
    # Divided by a number, CUDA would multiply by its reciprocal.
    return (high - low) / low.new_tensor(steps)
