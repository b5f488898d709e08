"""Rounding at random to whole levels of a bucket's maximum."""

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
from gradwire.kernels.native import levels as native
from gradwire.kernels.reference import levels as reference
from gradwire.kernels.reference import levels_rows as reference_rows

_triton = InTriton("levels")
_triton_rows = InTriton("levels_rows")


def encode_levels(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None = None,
    into: Pair | None = None,
) -> Pair:
    """Maxima [num_buckets] and packed levels of x + residual, rounded at random; float32.

    Level s + l means l / s times the maximum of the bucket, for -s <= l <= s = `num_levels`. `out`
    gets what is lost, as in `encode_signs`. The random bits are a Philox stream, 16 for each
    element. A scale is infinite or NaN if an element is. `into` is memory for both results.
    """
    check_fused("encode_levels", x, residual, out)
    _check_levels("encode_levels", num_levels, bucket, width)
    if into is not None:
        check_packed("encode_levels", into[1], x.numel() * width)
        check_scale("encode_levels", into[0], x.numel(), bucket)
    run = pick_into(x.device, native.encode_levels, reference.encode_levels, _triton.encode_levels)
    how = num_levels, bucket, width, seed, stream
    return run(flat(x), flat_or_none(residual), *how, out, into=into)


def encode_levels_rows(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None = None,
) -> Pair:
    """`encode_levels` of every row of x [n, d]: scales [n, num_buckets], packed [n, bytes].

    Row r draws from the stream whose last word is r more, as the keys of ranks in a row do.
    """
    check_rows("encode_levels_rows", x, residual, out)
    _check_levels("encode_levels_rows", num_levels, bucket, width)
    rows = reference.encode_levels_rows
    run = pick(x.device, rows, rows, _triton.encode_levels_rows)
    return run(x, residual, num_levels, bucket, width, seed, stream, out)


def decode_levels(
    packed: Tensor,
    scale: Tensor,
    num_levels: int,
    bucket: int,
    width: int,
    count: int,
    out: Tensor | None = None,
    checked: bool = True,
) -> tuple[Tensor, int]:
    """What `encode_levels` encoded, but for what was lost: float32 [count]; the highest symbol.

    `encode_levels` never makes symbols above 2 * num_levels; the caller must check. If it knows,
    because it made them, nobody waits for the highest one without `checked`: it is 0 then.
    """
    _check_levels("decode_levels", num_levels, bucket, width)
    check_packed("decode_levels", packed, count * width)
    check_scale("decode_levels", scale, count, bucket)
    check_out("decode_levels", out, count)
    run = pick(packed.device, native.decode_levels, reference.decode_levels, _triton.decode_levels)
    return run(packed, scale, num_levels, bucket, width, count, out, checked)


def decode_levels_rows(
    packed: Tensor, scale: Tensor, num_levels: int, bucket: int, width: int, count: int
) -> Tensor:
    """`decode_levels` of rows as `encode_levels_rows` makes them, which nobody checks: float32
    [rows, count]."""
    _check_levels("decode_levels_rows", num_levels, bucket, width)
    if packed.dim() != 2 or scale.dim() != 2 or len(packed) != len(scale):
        raise ValueError(
            f"decode_levels_rows takes matrices of as many rows, got {list(packed.shape)} and "
            f"{list(scale.shape)}"
        )
    for levels, largest in zip(packed[:1], scale[:1]):
        check_packed("decode_levels_rows", levels, count * width)
        check_scale("decode_levels_rows", largest, count, bucket)
    rows = reference_rows.decode_levels_rows
    run = pick(packed.device, rows, rows, _triton_rows.decode_levels_rows)
    return run(packed, scale, num_levels, bucket, width, count)


def _check_levels(operation: str, num_levels: int, bucket: int, width: int) -> None:
    if not 1 <= num_levels < 128 or not 2 * num_levels < 1 << width <= 256:
        raise ValueError(f"{operation}: {num_levels} levels at {width} bits; at most 8 bits")
    if bucket < 1 or bucket % 8:
        raise ValueError(f"{operation} takes buckets of a multiple of 8, got {bucket}")
