"""Signs scaled by mean magnitudes."""

from collections.abc import Sequence

from torch import Tensor

from gradwire.kernels._checks import check_fused, check_out, check_packed, check_scale, flat
from gradwire.kernels._dispatch import pick
from gradwire.kernels.native import signs as native
from gradwire.kernels.reference import signs as reference


def mean_magnitudes(x: Tensor, bucket: int) -> Tensor:
    """The mean of |x| over each bucket, float64 [num_buckets]: the same bits on every device."""
    return reference.mean_magnitudes(x.reshape(-1), bucket)


def encode_signs(
    x: Tensor, residual: Tensor | None, bucket: int, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean magnitudes [num_buckets] and packed signs of x + residual; float32, in one pass.

    `out`, if given, gets what is lost: x + residual - scale * sign. It must not be one of the
    inputs. `bucket` is a multiple of eight, or no less than the number of elements. A scale is
    infinite or NaN where an element is.
    """
    check_fused("encode_signs", x, residual, out)
    if bucket % 8 and bucket < x.numel():
        raise ValueError(f"encode_signs takes buckets of a multiple of 8, got {bucket}")
    run = pick(x.device, native.encode_signs, reference.encode_signs)
    return run(x.reshape(-1), flat(residual), bucket, out)


def mean_signs(
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    count: int,
    bucket: int,
    out: Tensor | None = None,
) -> Tensor:
    """The mean of what payloads of `encode_signs` decode to, added in order, float32 [count]."""
    if not packed or len(packed) != len(scale):
        raise ValueError(f"mean_signs: {len(packed)} packed vectors, {len(scale)} scales")
    if bucket < 1 or (bucket % 8 and bucket < count):
        raise ValueError(f"mean_signs takes buckets of a multiple of 8, got {bucket}")
    for bits, each in zip(packed, scale):
        check_packed("mean_signs", bits, count)
        check_scale("mean_signs", each, count, bucket)
    check_out("mean_signs", out, count)
    run = pick(packed[0].device, native.mean_signs, reference.mean_signs)
    return run(packed, scale, count, bucket, out)
