"""What is summed or compared in each bucket, along the tree of reference/tables.py.

A program does some blocks of up to 512 elements of one bucket each; the results of a bucket's
blocks are reduced likewise until one is left.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference.tables import SUMMED, Packing
from gradwire.kernels.triton._butterflies import fold_rows as fold
from gradwire.kernels.triton._common import (
    cdiv,
    launch,
    power_of_two,
    program_start,
    unpack_symbol,
)

_TILE = 4096  # elements of a program
# What a kernel reduces; a name is what comes out for each block.
_SUM = tl.constexpr(0)
_SQUARES = tl.constexpr(1)
_MOMENTS = tl.constexpr(2)
_SIDES = tl.constexpr(3)
_TAILS = tl.constexpr(4)
_PRODUCTS = tl.constexpr(5)
_MAXIMA = tl.constexpr(6)
_EXTREMES = tl.constexpr(7)


def bucket_maxima(x: Tensor, bucket: int) -> Tensor:
    largest, *_ = _reduce(x, bucket, _MAXIMA, (x.dtype,))
    return _until_one(largest, _MAXIMA)


def bucket_extremes(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    low, high = _reduce(x, bucket, _EXTREMES, (x.dtype, x.dtype))
    while low.shape[1] > 1:
        low, _ = _again(low, _EXTREMES, (x.dtype, x.dtype))
        _, high = _again(high, _EXTREMES, (x.dtype, x.dtype))
    return low.reshape(-1), high.reshape(-1)


def bucket_squares(x: Tensor, bucket: int) -> Tensor:
    (squares,) = _reduce(x, bucket, _SQUARES, (torch.float64,))
    return _until_one(squares, _SUM)


def bucket_sides(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    kinds = torch.float64, torch.float64, torch.int64
    above, below, negative = _reduce(x, bucket, _SIDES, kinds)
    return _until_one(above, _SUM), _until_one(below, _SUM), negative.sum(dim=1)


def cell_products(
    x: Tensor, packed: Tensor, bucket: int, values: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    kinds = torch.float64, torch.float64
    more = packed.contiguous(), values.contiguous()
    along, squares = _reduce(x, bucket, _PRODUCTS, kinds, *more, packing=packing)
    return _until_one(along, _SUM), _until_one(squares, _SUM)


def sums_of_moments(x: Tensor) -> Tensor:
    """The sum and the sum of squares: float64 [2]."""
    parts = _reduce(x, x.numel(), _MOMENTS, (torch.float64,) * 2)
    return _until_one(torch.cat(parts), _SUM)


def sums_of_tails(x: Tensor, threshold: float) -> Tensor:
    """How many lie above and below, and the sums of what lies outside and inside: float64 [4]."""
    limit = torch.full((1,), threshold, dtype=x.dtype, device=x.device)
    kinds = (torch.float64,) * 4
    *counts, outer, inner = _reduce(x, x.numel(), _TAILS, kinds, limit)
    return torch.cat([torch.cat(counts).sum(dim=1), _until_one(torch.cat([outer, inner]), _SUM)])


def sum_rows(rows: Tensor) -> Tensor:
    """float64 [rows, n] added up to [rows]."""
    return _until_one(rows.contiguous(), _SUM)


def _until_one(blocks: Tensor, kind: tl.constexpr) -> Tensor:
    """[num_buckets, n] to [num_buckets]."""
    while blocks.shape[1] > 1:
        (blocks,) = _again(blocks, kind, (blocks.dtype,))
    return blocks.reshape(-1)


def _again(
    blocks: Tensor, kind: tl.constexpr, dtypes: tuple[torch.dtype, ...]
) -> tuple[Tensor, ...]:
    return _reduce(blocks.reshape(-1), blocks.shape[1], kind, dtypes)


def _reduce(
    x: Tensor,
    bucket: int,
    kind: tl.constexpr,
    dtypes: tuple[torch.dtype, ...],
    packed: Tensor | None = None,
    values: Tensor | None = None,
    packing: Packing = (0, 1, 0),
) -> tuple[Tensor, ...]:
    """One result of each dtype for each block: [num_buckets, width]."""
    count = x.numel()
    bucket = max(1, min(bucket, count))
    block = min(SUMMED, power_of_two(bucket))
    width, num_buckets = cdiv(bucket, block), cdiv(count, bucket)
    out = tuple(x.new_empty(num_buckets, width, dtype=dtype) for dtype in dtypes)
    rows = _TILE // block
    launch(
        _blocks,
        (cdiv(num_buckets * width, rows),),
        x.contiguous(),
        x if packed is None else packed,  # or the threshold
        x if values is None else values,
        *out,
        *out[:1] * (4 - len(out)),
        count,
        bucket,
        width,
        num_buckets * width,
        KIND=kind.value,
        WIDTH=packing[1],
        BASE=packing[0],
        DIGITS=packing[2],
        ROWS=rows,
        BLOCK=block,
        LEVELS=block.bit_length() - 1,
    )
    return out


@triton.jit
def _blocks(
    x,
    packed,
    values,
    out0,
    out1,
    out2,
    out3,
    count,
    bucket,
    width,
    num_blocks,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BASE: tl.constexpr,
    DIGITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    j = program_start(ROWS) + tl.arange(0, ROWS)
    mine = j < num_blocks
    offset = (j % width)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = (j // width)[:, None] * bucket + offset
    mask = (offset < bucket) & (at < count)
    v = tl.load(x + at, mask=mask, other=0)
    if KIND == _SUM:
        tl.store(out0 + j, fold(v, ROWS, BLOCK, LEVELS), mask=mine)
    if KIND == _SQUARES:
        wide = v.to(tl.float64)
        tl.store(out0 + j, fold(wide * wide, ROWS, BLOCK, LEVELS), mask=mine)
    if KIND == _MOMENTS:
        wide = v.to(tl.float64)
        tl.store(out0 + j, fold(wide, ROWS, BLOCK, LEVELS), mask=mine)
        tl.store(out1 + j, fold(wide * wide, ROWS, BLOCK, LEVELS), mask=mine)
    if KIND == _SIDES:
        wide = v.to(tl.float64)
        above, below = tl.where(wide > 0, wide, 0.0), tl.where(wide < 0, -wide, 0.0)
        tl.store(out0 + j, fold(above, ROWS, BLOCK, LEVELS), mask=mine)
        tl.store(out1 + j, fold(below, ROWS, BLOCK, LEVELS), mask=mine)
        tl.store(out2 + j, tl.sum((v < 0).to(tl.int32), axis=1).to(tl.int64), mask=mine)
    if KIND == _TAILS:
        limit = tl.load(packed)
        magnitude = tl.abs(v)
        outside = magnitude >= limit
        above, below = (outside & (v > 0)).to(tl.int32), (outside & (v < 0)).to(tl.int32)
        wide = magnitude.to(tl.float64)
        tl.store(out0 + j, tl.sum(above, axis=1).to(tl.float64), mask=mine)
        tl.store(out1 + j, tl.sum(below, axis=1).to(tl.float64), mask=mine)
        outer, inner = tl.where(outside, wide, 0.0), tl.where(outside, 0.0, wide)
        tl.store(out2 + j, fold(outer, ROWS, BLOCK, LEVELS), mask=mine)
        tl.store(out3 + j, fold(inner, ROWS, BLOCK, LEVELS), mask=mine)
    if KIND == _PRODUCTS:
        symbol = unpack_symbol(packed, at, mask, WIDTH, BASE, DIGITS)
        code = tl.load(values + symbol, mask=mask & (symbol < BASE), other=0)
        along, squares = (v * code).to(tl.float64), (code * code).to(tl.float64)
        tl.store(out0 + j, fold(along, ROWS, BLOCK, LEVELS), mask=mine)
        tl.store(out1 + j, fold(squares, ROWS, BLOCK, LEVELS), mask=mine)
    if KIND == _MAXIMA:
        tl.store(out0 + j, tl.max(tl.abs(v), axis=1), mask=mine)
    if KIND == _EXTREMES:
        low = tl.min(tl.where(mask, v, float("inf")), axis=1)
        high = tl.max(tl.where(mask, v, float("-inf")), axis=1)
        tl.store(out0 + j, low + 0.0, mask=mine)  # without a sign of zero
        tl.store(out1 + j, high + 0.0, mask=mine)
