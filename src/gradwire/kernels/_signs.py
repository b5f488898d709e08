"""Signs scaled by mean magnitudes."""

from collections.abc import Sequence

import torch
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
from gradwire.kernels._dispatch import InTriton, Pair, pick, pick_into, runs_triton
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


def encode_signs_in(
    x: Tensor,
    residual: Tensor | None,
    bucket: int,
    out: Tensor | None,
    buffer: Tensor,
    scale_at: int,
    packed_at: int,
) -> None:
    """`encode_signs` into bytes: scales from byte `scale_at` on, signs from `packed_at` on.

    On an accelerator no views are made, each of which takes as long as a third of a launch.
    """
    count = x.numel()
    check_fused("encode_signs_in", x, residual, out)
    _check_bucket("encode_signs_in", bucket, count)
    _check_places("encode_signs_in", (buffer,), scale_at, packed_at, count, bucket)
    if runs_triton(x.device):
        none = reference.encode_signs_in
        run = pick(x.device, none, none, _triton.encode_signs_in)
        run(flat(x), flat_or_none(residual), bucket, out, buffer, scale_at, packed_at)
        return
    into = reference.parts_in(buffer, scale_at, packed_at, count, bucket)
    encode_signs(x, residual, bucket, out, into)


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


def mean_signs_in(
    buffers: Sequence[Tensor],
    scale_at: int,
    packed_at: int,
    count: int,
    bucket: int,
    out: Tensor | None = None,
) -> Tensor:
    """`mean_signs` of what `encode_signs_in` has written to the same places of all buffers."""
    if not buffers:
        raise ValueError("mean_signs_in: no buffers")
    _check_bucket("mean_signs_in", bucket, count)
    _check_places("mean_signs_in", buffers, scale_at, packed_at, count, bucket)
    check_out("mean_signs_in", out, count)
    device = buffers[0].device
    if runs_triton(device):
        none = reference.mean_signs_in
        run = pick(device, none, none, _triton.mean_signs_in)
        return run(buffers, scale_at, packed_at, count, bucket, out)
    parts = [reference.parts_in(each, scale_at, packed_at, count, bucket) for each in buffers]
    return mean_signs([bits for _, bits in parts], [s for s, _ in parts], count, bucket, out)


def _check_places(
    operation: str,
    buffers: Sequence[Tensor],
    scale_at: int,
    packed_at: int,
    count: int,
    bucket: int,
) -> None:
    end = max(scale_at + 4 * -(-count // max(1, bucket)), packed_at - (-count // 8))
    for buffer in buffers:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.numel() < end:
            raise ValueError(
                f"{operation} needs a vector of {end} bytes as uint8, got {buffer.dtype} "
                f"{list(buffer.shape)}"
            )
        if scale_at < 0 or packed_at < 0 or (buffer.data_ptr() + scale_at) % 4:
            raise ValueError(
                f"{operation} needs scales at a multiple of 4 bytes, got bytes {scale_at} and "
                f"{packed_at}"
            )


def _check_bucket(operation: str, bucket: int, count: int) -> None:
    if (bucket < 1 and count) or (bucket % 8 and bucket < count):
        raise ValueError(f"{operation} takes buckets of a multiple of 8, got {bucket}")
