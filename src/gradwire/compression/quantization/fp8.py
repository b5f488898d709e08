"""8-bit floats with a scale per block (Micikevicius et al. 2022, "FP8 formats for deep learning").

A block is scaled so that its largest magnitude a becomes the largest number of the format,
q_i = fp8(x_i F / a) with F = 448 (e4m3) or 57344 (e5m2), and decodes to q_i a / F. The paper
scales whole tensors; smaller blocks lose less to underflow. What travels of a block is
a itself, since a / F may underflow where a does not.

Rounding to nearest moves a normal number by at most u / (1 + u) of it, u = 2^-4 or 2^-3, and one
below the smallest normal by half the smallest step h. Over a block of b elements
|C(x) - x|^2 <= (u^2 + b (h / (2 F))^2) |x|^2, where u^2 in place of (u / (1 + u))^2 leaves room
for the rounding of the scaling. So it contracts with delta = 1 - u^2 - b (h / (2 F))^2.

Use it for a quarter of the traffic where small elements beside large ones must keep their relative
precision, or where 8-bit floats are what comes next anyway. If only the squared error counts,
`lowprec(8)` errs less at the same size and is unbiased.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._packed import PackedCodec, constants, finished, look_up
from gradwire.compression.quantization._scales import bucket_norm, check_bucket
from gradwire.core.codec import Guarantee, Parts, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, repr=False)
class FP8(PackedCodec):
    """Round every element to an 8-bit float, relative to the largest of its block."""

    format: Literal["e4m3", "e5m2"] = "e4m3"  # bits of exponent and of mantissa
    block: int = 128  # elements that share one scale

    paper = "Micikevicius et al. 2022, FP8 formats for deep learning"
    examples = ("fp8", 'fp8("e5m2")', "fp8(block=16)")

    parts = ("scale", "values")
    packs_anything = True

    def __post_init__(self) -> None:
        if self.format not in _DTYPES:
            raise ValueError(f'fp8: format is "e4m3" or "e5m2", got {self.format!r}')
        check_bucket("fp8", "block", self.block)

    def guarantee(self, spec: Spec) -> Guarantee:
        info = torch.finfo(_DTYPES[self.format])
        half_ulp = info.eps / 2
        half_step = info.tiny * info.eps / 2  # of the subnormal numbers
        block = max(1, min(self.block, spec.numel))
        return Guarantee(delta=1 - half_ulp**2 - block * (half_step / info.max) ** 2)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=256)

    def pack(self, x: Tensor, key: Key) -> Parts:
        x = x.to(scale_dtype(x.dtype))
        scale = bucket_norm(x, self.block)
        return {
            "scale": scale,
            "values": kernels.to_fp8(x, scale, self.block, _DTYPES[self.format]),
        }

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        count, dtype = num_buckets(spec.numel, self.block), scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], count, dtype)
        table = constants(_fractions(self.format), dtype, scale.device)
        return finished(look_up(parts["values"], table, scale, self.block, spec.numel), spec.dtype)


@lru_cache
def _fractions(name: str) -> tuple[float, ...]:
    """What each byte stands for, relative to the largest number; NaN where it is none."""
    target = _DTYPES[name]
    numbers = torch.arange(256, dtype=torch.uint8).view(target).double() / torch.finfo(target).max
    return tuple(numbers.tolist())
