"""NUQSGD (Ramezani-Kebrya et al. 2021, "NUQSGD: provably communication-efficient data-parallel SGD
via nonuniform quantization").

QSGD with levels where the elements of a normalised bucket are: 0, p^(s-1) ... p^2, p, 1 for a ratio
p, of which s lie above zero (the paper counts those between 0 and 1, one less). |v_i| / |v| is
rounded at random to one of the two levels around it, so that E = v. With p = 1/2, the paper's
choice, it is the method that Horvath et al. call natural dithering in the Euclidean norm.

Between levels l = p h and h rounding r costs (r - l)(h - r) <= r^2 (1 - p)^2 / (4 p), the most at
r = 2 l h / (l + h): 1/8 for p = 1/2. Below the least level a it costs r (a - r), over a bucket of b
elements at most b a^2 / 4 and at most a sqrt(b). Together omega = (1 - p)^2 / (4 p) +
min(b a^2 / 4, a sqrt(b)). This is derived here, for every p; the paper's bound for p = 1/2 has the
same leading terms.

Use it, with 7 levels or more and without `ef(...)`, to compare with the paper, or for its bound:
with enough levels omega comes near 1/8, however long the bucket. At 4 bits `qsgd`,
`natural_dithering` and above all `adaptive` err less on all vectors of the table.
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
    check_levels,
    levels_above_zero,
    mirrored,
)
from gradwire.core.codec import Guarantee, Parts, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_OCTAVES = 100  # float32 has 126 below one


@dataclass(frozen=True, repr=False)
class NUQ(PackedCodec):
    """Round at random to the norm of a bucket times powers of a ratio, or to zero."""

    levels: int | None = None  # s: levels above zero
    bits: int | None = None  # of one element: s = 2^(bits - 1) - 1
    bucket: int = 512  # elements that share one norm
    ratio: float = 0.5  # p: of a level to the next above

    paper = (
        "Ramezani-Kebrya et al. 2021, NUQSGD: provably communication-efficient data-parallel SGD "
        "via nonuniform quantization"
    )
    examples = ("nuq(bits=4)", "nuq(1)", "nuq(5, bucket=64)", "nuq(7, ratio=0.7)")

    parts = ("scale", "values")

    def __post_init__(self) -> None:
        check_levels("nuq", self.levels, self.bits)
        if not 0 < self.ratio < 1:
            raise ValueError(f"nuq: ratio must lie between 0 and 1, got {self.ratio}")
        if (self.num_levels - 1) * math.log2(1 / self.ratio) > _OCTAVES:
            raise ValueError(
                f"nuq: {self.num_levels} levels of ratio {self.ratio} reach below 2^-{_OCTAVES}, "
                "where no gradient is; take fewer levels or a ratio nearer to 1"
            )
        check_bucket("nuq", "bucket", self.bucket)

    @property
    def num_levels(self) -> int:
        return levels_above_zero(self.levels, self.bits)

    def guarantee(self, spec: Spec) -> Guarantee:
        s, b, p = self.num_levels, max(1, min(self.bucket, spec.numel)), self.ratio
        least = p ** (s - 1)
        between = (1 - p) ** 2 / (4 * p) if s > 1 else 0.0
        return Guarantee(omega=between + min(b * least**2 / 4, least * math.sqrt(b)))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2 * self.num_levels + 1)

    def pack(self, x: Tensor, key: Key) -> Parts:
        x = x.to(scale_dtype(x.dtype))
        scale, levels = bucket_norm(x, self.bucket, "l2"), self._table(x)
        draw, how = (key.seed, key.stream), packing(2 * self.num_levels + 1)
        packed = kernels.to_levels(x, scale, self.bucket, levels, draw, how)
        return {"scale": scale, "values": packed}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        count, dtype = num_buckets(spec.numel, self.bucket), scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], count, dtype)
        table = mirrored(self._table(scale))
        return finished(look_up(parts["values"], table, scale, self.bucket, spec.numel), spec.dtype)

    def _table(self, like: Tensor) -> Tensor:
        powers = [self.ratio**j for j in reversed(range(self.num_levels))]
        return torch.tensor([0.0, *powers], dtype=like.dtype, device=like.device)
