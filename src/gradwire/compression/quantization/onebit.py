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

from gradwire.compression.quantization._buckets import (
    clamp_to,
    from_buckets,
    num_buckets,
    to_buckets,
)
from gradwire.compression.quantization._scales import bucket_sizes, check_bucket
from gradwire.core.codec import Codec, Guarantee, Kind, Parts, State, expect_scale, scale_dtype
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class OneBit(Codec):
    """Send one bit per element, and the means of both signs for each bucket."""

    bucket: int = 512  # elements that share two values: an eighth of a bit each

    paper = (
        "Seide et al. 2014, 1-bit stochastic gradient descent and its application to "
        "data-parallel distributed training of speech DNNs"
    )
    examples = ("onebit", "onebit(64)", "onebit(1)")

    leaves = Kind.SYMBOLS
    parts = ("scale", "values")

    def __post_init__(self) -> None:
        check_bucket("onebit", "bucket", self.bucket)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(delta=1 / max(1, min(self.bucket, spec.numel)))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        dtype = scale_dtype(x.dtype)
        buckets = to_buckets(x.to(dtype), self.bucket)  # [num_buckets, bucket]
        negative = buckets < 0
        num_negative = negative.sum(dim=1)
        counts = torch.stack(
            [bucket_sizes(x.numel(), self.bucket, x.device) - num_negative, num_negative], dim=1
        )
        # Divided before they are added up: a sum may overflow where its mean does not.
        counts = counts.clamp(min=1).double()
        above = (buckets.clamp(min=0) / counts[:, :1]).sum(dim=1)
        below = (buckets.clamp(max=0) / counts[:, 1:]).sum(dim=1)
        means = torch.stack([above, -below], dim=1)  # magnitudes, [num_buckets, 2]
        return {"scale": clamp_to(means, dtype), "values": x < 0}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype, count = scale_dtype(spec.dtype), num_buckets(spec.numel, self.bucket)
        means = expect_scale(parts["scale"], 2 * count, dtype).reshape(count, 2)
        negative = to_buckets(parts["values"], self.bucket) != 0
        decoded = torch.where(negative, -means[:, 1:], means[:, :1])
        return clamp_to(from_buckets(decoded, spec.numel), spec.dtype)
