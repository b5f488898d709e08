"""TernGrad (Wen et al. 2017, "TernGrad: ternary gradients to reduce communication in distributed
deep learning").

g~_i = s sign(g_i) b_i,  b_i ~ Bernoulli(|g_i| / s),  s = max |g|       (their eq. 1 to 3)

Before that, elements beyond c sigma are clipped to it, with c = 2.5: fewer elements then
round to zero, at the price of a bias. One s serves the whole tensor (their layer-wise ternarising)
or, with `bucket`, as many consecutive elements. With `share` all workers use the largest s of any
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

from gradwire.compression.quantization._buckets import (
    clamp_to,
    dither,
    from_buckets,
    num_buckets,
    to_buckets,
)
from gradwire.compression.quantization._scales import (
    bucket_scale,
    bucket_sizes,
    check_bucket,
    relative_to,
)
from gradwire.core.codec import Codec, Guarantee, Kind, Parts, State, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class TernGrad(Codec):
    """Round at random to minus, zero or plus the largest magnitude, after clipping."""

    clip: float = 2.5  # c: clip at c sigma; 0 clips nothing and is unbiased
    bucket: int | None = None  # elements that share one scale; None: the whole tensor
    share: bool = False  # all workers use the largest scale of any of them
    scale: float | None = None  # s, if everybody knows it: what sharing comes to

    paper = (
        "Wen et al. 2017, TernGrad: ternary gradients to reduce communication in distributed "
        "deep learning"
    )
    examples = ("terngrad", "terngrad(0.0)", "terngrad(0.0, bucket=64)", "terngrad(scale=1.5)")

    leaves = Kind.SYMBOLS

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

    @property
    def parts(self) -> tuple[str, ...]:
        return ("scale", "values") if self.scale is None else ("values",)

    def guarantee(self, spec: Spec) -> Guarantee:
        if self.clip or self.share or self.scale is not None:
            return Guarantee(grows=True)
        size = max(1, min(self._bucket(spec.numel), spec.numel))
        return Guarantee(omega=(math.sqrt(size) - 1) / 2)

    def statistic(self, x: Tensor) -> Tensor | None:
        if not self.share or self.scale is not None:
            return None
        scale = self._scale(self._buckets(x.detach().reshape(-1)), x.numel())
        return scale if x.numel() else scale.new_zeros(1)

    def agreed(self, statistic: Tensor) -> "TernGrad":
        return replace(self, scale=float(statistic)) if self.share else self

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=3)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        buckets = self._buckets(x)
        own = self._scale(buckets, x.numel())
        parts = {"scale": own}
        # What lies beyond its own scale is clipped to it here, and then to the known one.
        fractions = from_buckets(relative_to(buckets, own), x.numel())
        if self.scale is not None:
            parts, known = {}, self._known(own.dtype)
            ratio = clamp_to(own / known, own.dtype) if known else torch.zeros_like(own)
            fractions = (fractions * ratio).clamp(-1, 1)
        kept = dither(x.numel(), key, fractions) < fractions.abs()
        return {**parts, "values": (kept * fractions.sign()).to(torch.int32) + 1}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype, trits = scale_dtype(spec.dtype), parts["values"]
        signs = trits.to(dtype) - 1
        if self.scale is not None:
            return clamp_to(signs * self._known(dtype), spec.dtype)
        bucket = self._bucket(spec.numel)
        scale = expect_scale(parts["scale"], num_buckets(spec.numel, bucket), dtype)
        decoded = to_buckets(signs, bucket) * scale[:, None]
        return clamp_to(from_buckets(decoded, spec.numel), spec.dtype)

    def _known(self, dtype: torch.dtype) -> float:
        """The scale that everybody knows, as a number of `dtype`."""
        assert self.scale is not None
        return float(torch.tensor(min(self.scale, torch.finfo(dtype).max), dtype=dtype))

    def _bucket(self, numel: int) -> int:
        return max(1, numel) if self.bucket is None else self.bucket

    def _buckets(self, x: Tensor) -> Tensor:
        return to_buckets(x.to(scale_dtype(x.dtype)), self._bucket(x.numel()))

    def _scale(self, buckets: Tensor, numel: int) -> Tensor:
        """The largest magnitude of each bucket that is left after clipping."""
        largest = bucket_scale(buckets)
        if not self.clip:
            return largest
        squares = relative_to(buckets, largest).square().sum(dim=1, dtype=torch.float64)
        sizes = bucket_sizes(numel, self._bucket(numel), buckets.device)
        limit = self.clip * (squares / sizes).sqrt()  # relative to the largest
        return (largest * limit.clamp(max=1)).to(largest.dtype)
