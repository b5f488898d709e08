"""Signs scaled by mean magnitudes."""

from collections.abc import Sequence

from torch import Tensor

from gradwire.kernels._checks import (
    check_fused,
    check_out,
    check_packed,
    check_rows,
    check_scale,
    flat,
    flat_or_none,
)
from gradwire.kernels._dispatch import InTriton, Pair, pick, pick_into
from gradwire.kernels.native import signs as native
from gradwire.kernels.reference import signs as reference

_triton = InTriton("signs")


def mean_magnitudes(x: Tensor, bucket: int) -> Tensor:
    """The mean of |x| over each bucket, float64 [num_buckets]: the same bits on every device."""
    means = reference.mean_magnitudes
    return pick(x.device, means, means, _triton.mean_magnitudes)(x.reshape(-1), bucket)


def encode_signs(
    x: Tensor,
    residual: Tensor | None,
    bucket: int,
    out: Tensor | None = None,
    into: Pair | None = None,
) -> Pair:
    """Mean magnitudes [num_buckets] and packed signs of x + residual; float32, in one pass.

    `out`, if given, gets what is lost: x + residual - scale * sign. It must not be one of the
    inputs. `bucket` is a multiple of eight, or no less than the number of elements. A scale is
    infinite or NaN where an element is. `into` is memory for both results.
    """
    check_fused("encode_signs", x, residual, out)
    _check_bucket("encode_signs", bucket, x.numel())
    if into is not None:
        check_packed("encode_signs", into[1], x.numel())
        check_scale("encode_signs", into[0], x.numel(), max(1, bucket))
    run = pick_into(x.device, native.encode_signs, reference.encode_signs, _triton.encode_signs)
    return run(flat(x), flat_or_none(residual), bucket, out, into=into)


def encode_signs_rows(
    x: Tensor, residual: Tensor | None, bucket: int, out: Tensor | None = None
) -> Pair:
    """`encode_signs` of every row of x [n, d]: scales [n, num_buckets], packed [n, bytes]."""
    check_rows("encode_signs_rows", x, residual, out)
    _check_bucket("encode_signs_rows", bucket, x.shape[1])
    rows = reference.encode_signs_rows
    return pick(x.device, rows, rows, _triton.encode_signs_rows)(x, residual, bucket, out)


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
    _check_bucket("mean_signs", bucket, count)
    for bits, each in zip(packed, scale):
        check_packed("mean_signs", bits, count)
        check_scale("mean_signs", each, count, bucket)
    check_out("mean_signs", out, count)
    run = pick(packed[0].device, native.mean_signs, reference.mean_signs, _triton.mean_signs)
    return run(packed, scale, count, bucket, out)


def _check_bucket(operation: str, bucket: int, count: int) -> None:
    if (bucket < 1 and count) or (bucket % 8 and bucket < count):
        raise ValueError(f"{operation} takes buckets of a multiple of 8, got {bucket}")
