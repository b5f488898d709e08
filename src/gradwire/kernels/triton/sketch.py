"""Count sketches: elements are sorted by column, and each column adds up its own in their order.

So the sums are those of the reference; atomic additions would depend on timing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import cdiv, launch, program_start

_BLOCK = 1024  # elements of a program
_COLUMNS = 128  # of a program


def sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    x, count, rows = x.contiguous(), x.numel(), hashes.shape[1]
    table = torch.zeros(rows, columns, dtype=torch.float32, device=x.device)
    if not count:
        return table
    hashes = hashes.to(x.device).contiguous()
    signed = torch.empty_like(x)
    places = torch.empty(count, dtype=torch.int32, device=x.device)
    edges = torch.arange(columns + 1, dtype=torch.int32, device=x.device)
    for row in range(rows):
        grid = (cdiv(count, _BLOCK),)
        launch(_hash, grid, x, hashes, places, signed, count, rows, columns, row, BLOCK=_BLOCK)
        in_order, order = places.sort(stable=True)
        starts = torch.searchsorted(in_order, edges)
        grid = (cdiv(columns, _COLUMNS),)
        launch(_add, grid, signed, order, starts, table[row], columns, COLUMNS=_COLUMNS)
    return table


def sketch_medians(table: Tensor, hashes: Tensor, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.float32, device=table.device)
    table, hashes = table.contiguous(), hashes.to(table.device).contiguous()
    rows, columns = table.shape
    grid = (cdiv(count, _BLOCK),)
    launch(_medians, grid, table, hashes, out, count, columns, ROWS=rows, BLOCK=_BLOCK)
    return out


@triton.jit
def _hashed(hashes, at, rows, columns, row):
    """Columns and signs of some elements in one row."""
    word = (tl.load(hashes + row) * at + tl.load(hashes + rows + row)) >> 32 & 0xFFFFFFFF
    return ((word >> 1) * columns) >> 31, (word & 1) > 0


@triton.jit(do_not_specialize=["count", "rows", "columns", "row"])
def _hash(x, hashes, places, signed, count, rows, columns, row, BLOCK: tl.constexpr):
    at = program_start(BLOCK) + tl.arange(0, BLOCK)
    mask = at < count
    column, is_negative = _hashed(hashes, at, rows, columns, row)
    value = tl.load(x + at, mask=mask, other=0)
    tl.store(places + at, column.to(tl.int32), mask=mask)
    tl.store(signed + at, tl.where(is_negative, -value, value), mask=mask)


@triton.jit(do_not_specialize=["columns"])
def _add(signed, order, starts, table, columns, COLUMNS: tl.constexpr):
    column = program_start(COLUMNS) + tl.arange(0, COLUMNS)
    mask = column < columns
    at = tl.load(starts + column, mask=mask, other=0)
    end = tl.load(starts + column + 1, mask=mask, other=0)
    total = tl.zeros([COLUMNS], tl.float32)
    for _ in range(tl.max(end - at)):
        is_left = at < end
        element = tl.load(order + at, mask=is_left, other=0)
        value = tl.load(signed + element, mask=is_left, other=0)
        total = tl.where(is_left, total + value, total)
        at += 1
    tl.store(table + column, total, mask=mask)


@triton.jit
def _estimate(table, hashes, at, mask, columns, row, ROWS: tl.constexpr):
    column, is_negative = _hashed(hashes, at, ROWS, columns, row)
    value = tl.load(table + row * columns.to(tl.int64) + column, mask=mask, other=0)
    return tl.where(is_negative, -value, value)


@triton.jit(do_not_specialize=["count", "columns"])
def _medians(table, hashes, out, count, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of equal estimates the first is the smaller. NaN if one is."""
    at = program_start(BLOCK) + tl.arange(0, BLOCK)
    mask = at < count
    median = tl.zeros([BLOCK], tl.float32)
    has_nan = mask & (at < 0)
    for row in range(ROWS):
        value = _estimate(table, hashes, at, mask, columns, row, ROWS)
        rank = tl.zeros([BLOCK], tl.int32)
        for other in range(ROWS):
            against = _estimate(table, hashes, at, mask, columns, other, ROWS)
            is_before = (against < value) | ((against == value) & (other < row))
            rank += is_before.to(tl.int32)
        median = tl.where(rank == ROWS // 2, value, median)
        has_nan = has_nan | (value != value)
    median = tl.where(has_nan, float("nan"), median)
    tl.store(out + at, median, mask=mask)
