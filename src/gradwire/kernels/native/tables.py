"""Rounding to tables, packed, and back, in C: the bits of reference/tables.py, exactly.

The reference handles other dtypes than float32 and very long tables.
"""

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, load, parallel, pointer
from gradwire.kernels.reference import tables as reference
from gradwire.kernels.reference.tables import SUMMED, Draw, Packing

_CPU = torch.device("cpu")
_MASK = 0xFFFFFFFF
_TO_LEVELS, _TO_WHOLE, _TO_NEAREST, _TO_CELLS, _TO_FP8 = range(5)
_MAX_LEVELS, _MAX_EDGES = 256, 16


def bucket_maxima(x: Tensor, bucket: int) -> Tensor:
    if x.dtype != torch.float32:
        return reference.bucket_maxima(x, bucket)
    x, blocks = dense(x), _blocks(x, bucket, torch.float32)
    parallel().gw_bucket_maxima(x.data_ptr(), x.numel(), bucket, blocks.data_ptr())
    return blocks.amax(dim=1) if blocks.shape[1] > 1 else blocks.reshape(-1)


def bucket_extremes(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    if x.dtype != torch.float32:
        return reference.bucket_extremes(x, bucket)
    x = dense(x)
    low, high = _blocks(x, bucket, torch.float32), _blocks(x, bucket, torch.float32)
    parallel().gw_bucket_extremes(x.data_ptr(), x.numel(), bucket, low.data_ptr(), high.data_ptr())
    if low.shape[1] == 1:
        return low.reshape(-1), high.reshape(-1)
    return low.amin(dim=1), high.amax(dim=1)


def bucket_squares(x: Tensor, bucket: int) -> Tensor:
    if x.dtype != torch.float32:
        return reference.bucket_squares(x, bucket)
    x, blocks = dense(x), _blocks(x, bucket, torch.float64)
    parallel().gw_bucket_squares(x.data_ptr(), x.numel(), bucket, blocks.data_ptr())
    return _summed(blocks)


def bucket_sides(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    if x.dtype != torch.float32:
        return reference.bucket_sides(x, bucket)
    x = dense(x)
    above, below = _blocks(x, bucket, torch.float64), _blocks(x, bucket, torch.float64)
    negative = _blocks(x, bucket, torch.int64)
    parallel().gw_bucket_sides(
        x.data_ptr(),
        x.numel(),
        bucket,
        above.data_ptr(),
        below.data_ptr(),
        negative.data_ptr(),
    )
    return _summed(above), _summed(below), negative.sum(dim=1)


def cell_products(
    x: Tensor, packed: Tensor, bucket: int, values: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    if x.dtype != torch.float32 or bucket % 8 or packing[2] or packing[1] > 8:
        return reference.cell_products(x, packed, bucket, values, packing)
    x, packed, values = dense(x), dense(packed), _filled(values, 1 << packing[1])
    along, squares = _blocks(x, bucket, torch.float64), _blocks(x, bucket, torch.float64)
    parallel().gw_cell_products(
        x.data_ptr(),
        packed.data_ptr(),
        x.numel(),
        bucket,
        values.data_ptr(),
        packing[1],
        along.data_ptr(),
        squares.data_ptr(),
    )
    return _summed(along), _summed(squares)


def _summed(blocks: Tensor) -> Tensor:
    """What `reference.sum_rows` does, in place."""
    if blocks.shape[1] > 1:
        load().gw_sum_rows(blocks.data_ptr(), *blocks.shape)
    return blocks[:, 0].clone(memory_format=torch.contiguous_format)


def to_levels(
    x: Tensor, scale: Tensor | None, bucket: int, levels: Tensor, draw: Draw, packing: Packing
) -> Tensor:
    if x.dtype != torch.float32 or len(levels) > _MAX_LEVELS:
        return reference.to_levels(x, scale, bucket, levels, draw, packing)
    return _round(_TO_LEVELS, x, scale, None, bucket, levels, 0.0, 0.0, draw, packing)


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
    if x.dtype != torch.float32:
        return reference.to_whole(x, step, start, bucket, least, most, draw, packing)
    rule = _TO_NEAREST if draw is None else _TO_WHOLE
    return _round(rule, x, step, start, bucket, None, least, most, draw, packing)


def to_cells(x: Tensor, scale: Tensor, bucket: int, edges: Tensor, packing: Packing) -> Tensor:
    if x.dtype != torch.float32 or len(edges) > _MAX_EDGES:
        return reference.to_cells(x, scale, bucket, edges, packing)
    return _round(_TO_CELLS, x, scale, None, bucket, edges, 0.0, 0.0, None, packing)


def to_fp8(x: Tensor, scale: Tensor, bucket: int, dtype: torch.dtype) -> Tensor:
    if x.dtype != torch.float32:
        return reference.to_fp8(x, scale, bucket, dtype)
    most = torch.finfo(dtype).max
    return _round(_TO_FP8, x, scale, None, bucket, None, 0.0, most, None, (256, 8, 0))


def from_table(
    packed: Tensor,
    packing: Packing,
    table: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
    bucket: int,
    count: int,
) -> tuple[Tensor, bool]:
    if table.dtype != torch.float32:
        return reference.from_table(packed, packing, table, scale, start, bucket, count)
    alphabet, width, digits = packing
    packed, table = dense(packed), _filled(table, 1 << width)
    scale, start = _dense(scale), _dense(start)
    out = empty(count)
    bad: int = parallel().gw_from_table(
        packed.data_ptr(),
        pointer(scale),
        pointer(start),
        count,
        bucket,
        alphabet,
        width,
        digits,
        table.data_ptr(),
        out.data_ptr(),
    )
    return out, not bad


def from_pairs(packed: Tensor, pairs: Tensor, bucket: int, count: int) -> Tensor:
    if pairs.dtype != torch.float32:
        return reference.from_pairs(packed, pairs, bucket, count)
    packed, pairs, out = dense(packed), dense(pairs), empty(count)
    parallel().gw_from_pairs(packed.data_ptr(), pairs.data_ptr(), count, bucket, out.data_ptr())
    return out


def shorten_runs(packed: Tensor, zero: int, longest: int) -> Tensor:
    packed = dense(packed)
    code = torch.empty_like(packed)
    length: int = load().gw_shorten(
        packed.data_ptr(), packed.numel(), zero, longest, 255 - longest, code.data_ptr()
    )
    return code[:length]


def lengthen_runs(code: Tensor, zero: int, longest: int, count: int) -> tuple[Tensor, int]:
    code, packed = dense(code), torch.empty(count, dtype=torch.uint8, device=_CPU)
    total: int = load().gw_lengthen(
        code.data_ptr(), code.numel(), zero, 255 - longest, packed.data_ptr(), count
    )
    return packed, total


def _round(
    rule: int,
    x: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
    bucket: int,
    table: Tensor | None,
    least: float,
    most: float,
    draw: Draw | None,
    packing: Packing,
) -> Tensor:
    alphabet, width, digits = packing
    x, scale, start, table = dense(x), _dense(scale), _dense(start), _dense(table)
    count = x.numel()
    seed, stream = draw or (0, (0, 0, 0))
    packed = empty(-(-count // digits) if digits else -(-count * width // 8), torch.uint8)
    parallel().gw_round(
        x.data_ptr(),
        pointer(scale),
        pointer(start),
        count,
        bucket,
        rule,
        pointer(table),
        0 if table is None else len(table),
        least,
        most,
        seed & 0xFFFFFFFFFFFFFFFF,
        *(word & _MASK for word in stream),
        alphabet,
        width,
        digits,
        packed.data_ptr(),
    )
    return packed


def _blocks(x: Tensor, bucket: int, dtype: torch.dtype) -> Tensor:
    """Room for what each block of each bucket comes to."""
    shape = -(-x.numel() // bucket), -(-bucket // SUMMED)
    return torch.empty(shape, dtype=dtype, device=_CPU)


def _filled(table: Tensor, size: int) -> Tensor:
    """As many entries as C may look up: NaN for symbols that there are not."""
    return torch.nn.functional.pad(dense(table), (0, max(0, size - len(table))), value=torch.nan)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else dense(x)
