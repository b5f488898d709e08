"""Natural dithering (Horvath et al. 2019, "Natural compression for distributed deep learning").

As in QSGD each bucket is divided by its norm and rounded at random, but to the levels 0, 2^(1-s),
..., 1/4, 1/2, 1 instead of evenly spaced ones (their sec. 3): s levels then reach as low as
2^(s - 1) of QSGD's.

Rounding between two powers of two costs at most 1/8 of a squared element (see `natural`), and
below l = 2^(1-s) it costs y (l - y), which is at most l y and at most l^2 / 4 for an element y of
a bucket with norm 1. Over a bucket of b elements |y|_1 <= sqrt(b) for the Euclidean norm, and
|x|_inf |x|_1 <= (1 + sqrt(b)) / 2 |x|_2^2 for the maximum. So

    omega = 1/8 + min(l sqrt(b), b l^2 / 4)              norm="l2"
    omega = 1/8 + min(l (1 + sqrt(b)) / 2, b l^2 / 4)    norm="max"

which is never more than the 1/8 + sqrt(b) l min(1, sqrt(b) l) that they state.

Use it, without `ef(...)`, at 3 bits (3 levels), or for heavy-tailed gradients in buckets of
thousands of elements, where its levels err less than the even ones of `qsgd`. With buckets of 512
and 4 bits or more take `qsgd`; `adaptive` errs less in both cases but fits its levels in every
step.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._packed import PackedCodec, finished, look_up, packing
from gradwire.compression.quantization._powers import powers
from gradwire.compression.quantization._scales import bucket_norm, check_bucket, mirrored
from gradwire.core.codec import Guarantee, Parts, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class NaturalDithering(PackedCodec):
    """Round at random to the norm of a bucket times 1, 1/2, 1/4 and so on, or to zero."""

    levels: int  # s: levels above zero
    bucket: int = 512  # elements that share one norm
    norm: Literal["max", "l2"] = "max"

    paper = "Horvath et al. 2019, Natural compression for distributed deep learning"
    examples = (
        "natural_dithering(7)",
        "natural_dithering(1)",
        "natural_dithering(3, bucket=64)",
        'natural_dithering(4, norm="l2")',
    )

    parts = ("scale", "values")

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ValueError(
                f"natural_dithering: levels must lie in 1 .. 127, got {self.levels}. "
                "7 take 4 bits an element."
            )
        check_bucket("natural_dithering", "bucket", self.bucket)
        if self.norm not in ("max", "l2"):
            raise ValueError(f'natural_dithering: norm is "max" or "l2", got {self.norm!r}')

    def guarantee(self, spec: Spec) -> Guarantee:
        size = max(1, min(self.bucket, spec.numel))
        lowest, root = 2.0 ** (1 - self.levels), math.sqrt(size)
        most = root if self.norm == "l2" else (1 + root) / 2
        return Guarantee(omega=1 / 8 + min(lowest * most, size * lowest**2 / 4))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2 * self.levels + 1)

    def pack(self, x: Tensor, key: Key) -> Parts:
        x = x.to(scale_dtype(x.dtype))
        scale, levels = bucket_norm(x, self.bucket, self.norm), powers(1 - self.levels, 0, x)
        draw, how = (key.seed, key.stream), packing(2 * self.levels + 1)
        packed = kernels.to_levels(x, scale, self.bucket, levels, draw, how)
        return {"scale": scale, "values": packed}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        count, dtype = num_buckets(spec.numel, self.bucket), scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], count, dtype)
        table = mirrored(powers(1 - self.levels, 0, scale))
        return finished(look_up(parts["values"], table, scale, self.bucket, spec.numel), spec.dtype)
