"""One bit per element and two values per bucket (Seide et al. 2014, "1-bit stochastic gradient
descent and its application to data-parallel distributed training of speech DNNs").

An element decodes to the mean of the non-negative or to that of the negative elements of its
bucket, whichever it belongs to: the two values that minimise the squared error for this partition,
whose threshold is zero as in their experiments. Buckets take the place of the
columns of their weight matrices, since a flat vector has none. Use it in `ef(...)`, as they do.

With n+ elements of sum S+ and n- of sum S-, a bucket of b keeps S+^2 / n+ + S-^2 / n- of its
squared norm, which is at least |x|_1^2 / b >= |x|_2^2 / b: a contraction with delta = 1 / b.

Use it as `ef(onebit)` at one bit per element where the positive elements differ in size from the
negative ones, or magnitudes from place to place, which `sign` with its one scale cannot tell. Take
`ef(drive(unbiased=False))` if a rotation can be afforded: heavy tails cost it nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._packed import PackedCodec, finished
from gradwire.compression.quantization._scales import bucket_sizes, check_bucket
from gradwire.core.codec import Guarantee, Parts, clamp_to, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class OneBit(PackedCodec):
    """Send one bit per element, and the means of both signs for each bucket."""

    bucket: int = 512  # elements that share two values: an eighth of a bit each

    paper = (
        "Seide et al. 2014, 1-bit stochastic gradient descent and its application to "
        "data-parallel distributed training of speech DNNs"
    )
    examples = ("onebit", "onebit(64)", "onebit(1)")

    parts = ("scale", "values")

    def __post_init__(self) -> None:
        check_bucket("onebit", "bucket", self.bucket)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(delta=1 / max(1, min(self.bucket, spec.numel)))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2)

    def pack(self, x: Tensor, key: Key) -> Parts:
        x = x.to(scale_dtype(x.dtype))
        # Sums of float64 may overflow where their means do not; those of float32 are in float64.
        large = x.dtype == torch.float64 and x.numel() and bool(x.abs().max() > 2.0**960)
        factor = 2.0**-64 if large else 1.0
        above, below, negative = kernels.bucket_sides(x * factor if large else x, self.bucket)
        counts = bucket_sizes(x.numel(), self.bucket, x.device) - negative, negative
        means = torch.stack([above, below], dim=1) / torch.stack(counts, dim=1).clamp(min=1)
        return {"scale": clamp_to(means / factor, x.dtype), "values": kernels.pack_signs(x)}

    def decode_packed(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype, count = scale_dtype(spec.dtype), num_buckets(spec.numel, self.bucket)
        means = expect_scale(parts["scale"], 2 * count, dtype).reshape(count, 2)
        pairs = means * means.new_tensor([1.0, -1.0])
        decoded = kernels.from_pairs(parts["values"], pairs, self.bucket, spec.numel)
        return finished(decoded, spec.dtype)
