"""TernGrad (Wen et al. 2017, "TernGrad: ternary gradients to reduce communication in distributed
deep learning").

g~_i = s sign(g_i) b_i,  b_i ~ Bernoulli(|g_i| / s),  s = max |g|       (their eq. 1 to 3)

Before that, elements beyond c sigma are clipped to it, with c = 2.5: fewer elements then
round to zero, at the price of a bias. One s serves the whole vector, which is a layer, as in their
layer-wise ternarising, if the schedule is `sequential("layer")`, or, with `bucket`, as many
consecutive elements. With `share` all workers use the largest s of any
of them (their scaler sharing): one number is exchanged before, and none travels with the trits.

We differ in sigma: the root mean square, which is about zero and not about the mean. It is the
same for gradients, whose mean is small, and does not clip away a tensor of equal elements.

Without clipping it is unbiased given g, and E|g~ - g|^2 = sum_i s |g_i| - g_i^2. For b elements
|g|_inf |g|_1 <= (1 + sqrt(b)) / 2 |g|_2^2, with equality where one element is 1 and the others are
1 / (1 + sqrt(b)); so omega = (sqrt(b) - 1) / 2. A shared s has no such bound in terms of one g.
Error feedback does not suit it: on Gaussian vectors the residual came to several times the vector,
and with clipping it still grew after a hundred steps.

Use it without `ef(...)`, over enough workers for the noise to average out, as `terngrad >> golomb`:
heavy-tailed gradients then take well under a bit per element. Without a coder, or for gradients
near normal, `drive` errs less in fewer bits.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._packed import (
    PackedCodec,
    constants,
    finished,
    look_up,
    packing,
)
from gradwire.compression.quantization._scales import bucket_sizes, check_bucket
from gradwire.core.codec import Guarantee, Parts, SharedStatistic, Traits, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class TernGrad(PackedCodec):
    """Round at random to minus, zero or plus the largest magnitude, after clipping."""

    clip: float = 2.5  # c: clip at c sigma; 0 clips nothing and is unbiased
    bucket: int | None = None  # elements that share one scale; None: the whole tensor
    share: bool = False  # all workers use the largest scale of any of them
    scale: float | None = None  # s, if all workers know it: set by sharing

    paper = (
        "Wen et al. 2017, TernGrad: ternary gradients to reduce communication in distributed "
        "deep learning"
    )
    examples = ("terngrad", "terngrad(0.0)", "terngrad(0.0, bucket=64)", "terngrad(scale=1.5)")

    def __post_init__(self) -> None:
        if not (self.clip == 0 or 1 <= self.clip < math.inf):
            raise ValueError(
                f"terngrad: clip is in standard deviations, at least 1, or 0 for none; "
                f"got {self.clip}. The paper's is 2.5."
            )
        if self.bucket is not None:
            check_bucket("terngrad", "bucket", self.bucket)
            if self.share or self.scale is not None:
                raise ValueError(
                    f"terngrad: a scale that all workers share is one for the whole tensor; "
                    f"leave out bucket={self.bucket}"
                )
        if self.scale is not None and not 0 <= self.scale < math.inf:
            raise ValueError(
                f"terngrad: scale is a magnitude, 0 or a positive number; got {self.scale}"
            )

    packs_anything = True

    @property
    def parts(self) -> tuple[str, ...]:
        return ("scale", "values") if self.scale is None else ("values",)

    def guarantee(self, spec: Spec) -> Guarantee:
        if self.clip or self.share or self.scale is not None:
            return Guarantee(grows=True)
        size = max(1, min(self._bucket(spec.numel), spec.numel))
        return Guarantee(omega=(math.sqrt(size) - 1) / 2)

    @property
    def traits(self) -> Traits:
        shares = self.share and self.scale is None
        return Traits(
            statistic=SharedStatistic(self._largest, self._with_scale) if shares else None
        )

    def _largest(self, x: Tensor) -> Tensor:
        scale = self._scale(x.detach().reshape(-1).to(scale_dtype(x.dtype)))
        return scale if x.numel() else scale.new_zeros(1)

    def _with_scale(self, statistic: Tensor) -> "TernGrad":
        return replace(self, scale=float(statistic))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=3)

    def pack(self, x: Tensor, key: Key) -> Parts:
        x = x.to(scale_dtype(x.dtype))
        scale = self._scale(x)
        parts = {"scale": scale}
        if self.scale is not None:
            # What lies beyond its own scale is clipped to it here, then to the known one.
            parts, x = {}, torch.minimum(torch.maximum(x, -scale), scale)
            scale = torch.full_like(scale, self._known_scale(x.dtype))
        draw, levels = (key.seed, key.stream), constants((0.0, 1.0), x.dtype, x.device)
        packed = kernels.to_levels(x, scale, self._bucket(x.numel()), levels, draw, packing(3))
        return {**parts, "values": packed}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype, bucket = scale_dtype(spec.dtype), self._bucket(spec.numel)
        table = constants((-1.0, 0.0, 1.0), dtype, parts["values"].device)
        if self.scale is not None:
            scale = None
            table = table * self._known_scale(dtype)
        else:
            scale = expect_scale(parts["scale"], num_buckets(spec.numel, bucket), dtype)
        return finished(look_up(parts["values"], table, scale, bucket, spec.numel), spec.dtype)

    def _known_scale(self, dtype: torch.dtype) -> float:
        """The scale that all workers know, as a number of `dtype`."""
        assert self.scale is not None
        return float(torch.tensor(min(self.scale, torch.finfo(dtype).max), dtype=dtype))

    def _bucket(self, numel: int) -> int:
        return max(1, numel) if self.bucket is None else self.bucket

    def _scale(self, x: Tensor) -> Tensor:
        """The largest magnitude of each bucket that is left after clipping."""
        bucket = self._bucket(x.numel())
        largest = kernels.bucket_maxima(x, bucket)
        if not self.clip:
            return largest
        sizes = bucket_sizes(x.numel(), bucket, x.device)
        limit = self.clip * (kernels.bucket_squares(x, bucket) / sizes).sqrt()
        limit = torch.where(limit > 0, limit, torch.inf)  # squares of float64 may vanish
        return torch.minimum(limit, largest).to(x.dtype)
