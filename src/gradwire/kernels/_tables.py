"""Rounding to tables of levels and packing in one pass, and the statistics that scale it.

x is a flat vector of float32 or float64, cut into buckets of `bucket` elements, the last of which
may be shorter; scales and sums are one for each bucket. A scale of zero divides as one does. How
symbols are packed is a `Packing`. Elements must be finite: the caller has checked.
"""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count, check_packed
from gradwire.kernels._dispatch import InTriton, pick, runs_triton
from gradwire.kernels.native import tables as native
from gradwire.kernels.reference import tables as reference
from gradwire.kernels.reference.tables import Draw, Packing

_triton = InTriton("tables")
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def bucket_maxima(x: Tensor, bucket: int) -> Tensor:
    """The largest magnitude of each bucket."""
    bucket = _checked("bucket_maxima", x, bucket)
    return pick(x.device, native.bucket_maxima, reference.bucket_maxima, _triton.bucket_maxima)(
        x, bucket
    )


def bucket_extremes(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    """The least and the greatest element of each bucket; zeros come without a sign."""
    bucket = _checked("bucket_extremes", x, bucket)
    return pick(
        x.device, native.bucket_extremes, reference.bucket_extremes, _triton.bucket_extremes
    )(x, bucket)


def bucket_squares(x: Tensor, bucket: int) -> Tensor:
    """The sum of the squares of each bucket, float64, the same bits everywhere."""
    bucket = _checked("bucket_squares", x, bucket)
    return pick(x.device, native.bucket_squares, reference.bucket_squares, _triton.bucket_squares)(
        x, bucket
    )


def bucket_sides(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of the elements above zero, of the magnitudes below (float64), how many are below."""
    bucket = _checked("bucket_sides", x, bucket)
    return pick(x.device, native.bucket_sides, reference.bucket_sides, _triton.bucket_sides)(
        x, bucket
    )


def to_levels(
    x: Tensor, scale: Tensor | None, bucket: int, levels: Tensor, draw: Draw, packing: Packing
) -> Tensor:
    """Magnitudes over their scale rounded to one of the levels around, at random: E = x.

    Levels ascend from 0; without a scale they may end beyond 1, else there. The symbol of zero is
    s = len(levels) - 1, those above and below are of elements above and below zero.
    """
    bucket = _checked("to_levels", x, bucket, scale)
    if len(levels) < 2 or levels.dtype != x.dtype or packing[0] != 2 * len(levels) - 1:
        raise ValueError(
            f"to_levels takes two levels or more of {x.dtype} and packs 2s + 1 symbols, got "
            f"{len(levels)} of {levels.dtype} and {packing[0]} symbols"
        )
    run = pick(x.device, native.to_levels, reference.to_levels, _triton.to_levels)
    return run(x, scale, bucket, levels, draw, packing)


def to_whole(
    x: Tensor,
    step: Tensor,
    start: Tensor | None,
    bucket: int,
    least: int,
    most: int,
    draw: Draw | None,
    packing: Packing,
) -> Tensor:
    """(x - start) / step as whole numbers in least .. most, the symbol of `least` being 0.

    At random such that E = x, or without `draw` to the nearest, ties to even.
    """
    bucket = _checked("to_whole", x, bucket, step, start)
    if most - least >= packing[0] or max(-least, most) > 1 << 16:
        raise ValueError(f"to_whole packs {packing[0]} symbols, got {least} .. {most}")
    run = pick(x.device, native.to_whole, reference.to_whole, _triton.to_whole)
    return run(x, step, start, bucket, least, most, draw, packing)


def to_cells(x: Tensor, scale: Tensor, bucket: int, edges: Tensor, packing: Packing) -> Tensor:
    """How many of the ascending `edges` x / scale reaches."""
    bucket = _checked("to_cells", x, bucket, scale)
    if edges.dtype != x.dtype or packing[0] != len(edges) + 1:
        raise ValueError(
            f"to_cells packs a symbol for each cell between edges of {x.dtype}, got {len(edges)} "
            f"edges of {edges.dtype} and {packing[0]} symbols"
        )
    return pick(x.device, native.to_cells, reference.to_cells, _triton.to_cells)(
        x, scale, bucket, edges, packing
    )


def cell_products(
    x: Tensor, packed: Tensor, bucket: int, values: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    """Sums of x c and of c^2 over each bucket, float64, c being the value that a symbol names."""
    bucket = _checked("cell_products", x, bucket)
    _check_bytes("cell_products", packed, x.numel(), packing)
    if values.dtype != x.dtype or len(values) != packing[0]:
        raise ValueError(f"cell_products takes {packing[0]} values of {x.dtype}")
    run = pick(x.device, native.cell_products, reference.cell_products, _triton.cell_products)
    return run(x, packed, bucket, values, packing)


def to_fp8(x: Tensor, scale: Tensor, bucket: int, dtype: torch.dtype) -> Tensor:
    """x / scale times the largest number of an 8-bit float format, as bytes of that format."""
    bucket = _checked("to_fp8", x, bucket, scale)
    if dtype not in _FP8:
        raise ValueError(f"to_fp8 makes {_FP8[0]} or {_FP8[1]}, not {dtype}")
    run = pick(x.device, native.to_fp8, reference.to_fp8, _triton.to_fp8)
    return run(x, scale, bucket, dtype)


def from_table(
    packed: Tensor,
    packing: Packing,
    table: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
    bucket: int,
    count: int,
    checked: bool = True,
) -> tuple[Tensor, bool]:
    """table[symbol] * scale + start, [count], in the finite range of float32 or float64.

    Also whether every symbol names a finite number of the table; if not, the vector is of no use.
    A caller that knows, because it made them, does without `checked`: then an accelerator is not
    waited for.
    """
    check_count("from_table", "count", count)
    _check_bytes("from_table", packed, count, packing)
    bucket = min(bucket, max(1, count))
    for each in (scale, start):
        if each is not None:
            _check_scale("from_table", each, table, -(-count // bucket))
    if table.dtype not in (torch.float32, torch.float64) or len(table) != packing[0]:
        raise ValueError(
            f"from_table takes a number for each of {packing[0]} symbols, got {len(table)} of "
            f"{table.dtype}"
        )
    given = packed, packing, table, scale, start, bucket, count
    if not checked and runs_triton(packed.device):
        there = _triton.from_table_unchecked
    else:
        there = _triton.from_table
    return pick(packed.device, native.from_table, reference.from_table, there)(*given)


def from_pairs(packed: Tensor, pairs: Tensor, bucket: int, count: int) -> Tensor:
    """Of each bucket's two numbers, pairs [num_buckets, 2], the one that a bit names; [count]."""
    check_count("from_pairs", "count", count)
    check_packed("from_pairs", packed, count)
    bucket = min(bucket, max(1, count))
    if tuple(pairs.shape) != (-(-count // bucket), 2):
        raise ValueError(
            f"from_pairs takes two numbers for each of {-(-count // bucket)} buckets, got "
            f"{list(pairs.shape)}"
        )
    run = pick(packed.device, native.from_pairs, reference.from_pairs, _triton.from_pairs)
    return run(packed, pairs, bucket, count)


def shorten_runs(packed: Tensor, zero: int, longest: int) -> Tensor:
    """Bytes with runs of the byte `zero` shortened.

    2 .. longest of them in a row become one byte, which is 255 - longest plus their number; other
    bytes must lie below 257 - longest. Longer runs are cut from their beginning on.
    """
    _check_runs("shorten_runs", packed, zero, longest)
    return pick(packed.device, native.shorten_runs, reference.shorten_runs)(packed, zero, longest)


def lengthen_runs(code: Tensor, zero: int, longest: int, count: int) -> tuple[Tensor, int]:
    """The inverse of `shorten_runs`, [count], and how many bytes there are in truth.

    Unless that is `count` the bytes are of no use.
    """
    check_count("lengthen_runs", "count", count)
    _check_runs("lengthen_runs", code, zero, longest)
    run = pick(code.device, native.lengthen_runs, reference.lengthen_runs)
    return run(code, zero, longest, count)


def _check_runs(operation: str, packed: Tensor, zero: int, longest: int) -> None:
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ValueError(f"{operation} takes a flat vector of uint8, got {packed.dtype}")
    if not 2 <= longest < 255 or not 0 <= zero < 257 - longest:
        raise ValueError(f"{operation}: no byte is left for runs of up to {longest} x {zero}")


def _checked(operation: str, x: Tensor, bucket: int, *scales: Tensor | None) -> int:
    """The bucket, no longer than x."""
    if x.dtype not in (torch.float32, torch.float64) or x.dim() != 1:
        raise ValueError(
            f"{operation} takes a flat vector of float32 or float64, got {x.dtype} {list(x.shape)}"
        )
    if bucket < 1:
        raise ValueError(f"{operation} takes buckets of at least one element, got {bucket}")
    bucket = min(bucket, max(1, x.numel()))
    for scale in scales:
        if scale is not None:
            _check_scale(operation, scale, x, -(-x.numel() // bucket))
    return bucket


def _check_scale(operation: str, scale: Tensor, like: Tensor, num_buckets: int) -> None:
    if scale.dtype != like.dtype or scale.numel() != num_buckets:
        raise ValueError(
            f"{operation} takes {num_buckets} scales of {like.dtype}, got {scale.numel()} of "
            f"{scale.dtype}"
        )


def _check_bytes(operation: str, packed: Tensor, count: int, packing: Packing) -> None:
    _, width, digits = packing
    expected = -(-count // digits) if digits else -(-count * width // 8)
    if packed.dtype != torch.uint8 or packed.numel() != expected:
        raise ValueError(
            f"{operation} takes {expected} bytes of uint8, got {packed.numel()} of {packed.dtype}"
        )
