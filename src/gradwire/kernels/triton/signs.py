"""Signs scaled by mean magnitudes, along the tree of reference/signs.py: what is started when.

A bucket of up to _SMALL elements is done by one program, in one pass. Of longer buckets a first
kernel packs the signs and adds up blocks of 256, others add those, and the last one writes what is
lost: x and the residual are read twice. Rows of a matrix are vectors of their own. Means of what
was encoded are in _sign_means.py.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gradwire.kernels.triton._common import cdiv, launch, power_of_two
from gradwire.kernels.triton._sign_kernels import (
    encode_blocks,
    encode_buckets,
    encode_small,
    fold_columns,
    scales,
)
from gradwire.kernels.triton._sign_kernels import lost as lost_of_signs
from gradwire.kernels.triton._sign_means import mean_signs as mean_signs
from gradwire.kernels.triton._sign_means import mean_signs_in as mean_signs_in

_BLOCK = 256  # elements that are added first
_TILE = 4096  # elements of a program
_SMALL = 4096  # elements of a bucket that one program adds up
_FOLDED = 2048  # sums that one program adds up


def encode_signs(
    x: Tensor,
    residual: Tensor | None,
    bucket: int,
    out: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    count, device = x.numel(), x.device
    bucket = max(1, min(bucket, count))
    if into is None:
        scale = torch.empty(cdiv(count, bucket), dtype=torch.float32, device=device)
        into = scale, torch.empty(cdiv(count, 8), dtype=torch.uint8, device=device)
    _encode(x, residual, bucket, out, *into, (1, count))
    return into


def encode_signs_in(
    x: Tensor,
    residual: Tensor | None,
    bucket: int,
    out: Tensor | None,
    buffer: Tensor,
    scale_at: int,
    packed_at: int,
) -> None:
    count = x.numel()
    bucket = max(1, min(bucket, count))
    _encode(x, residual, bucket, out, buffer, buffer, (1, count), scale_at, packed_at)


def encode_signs_rows(
    x: Tensor, residual: Tensor | None, bucket: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, count = x.shape
    bucket = max(1, min(bucket, count))
    scale = torch.empty(rows, cdiv(count, bucket), dtype=torch.float32, device=x.device)
    packed = torch.empty(rows, cdiv(count, 8), dtype=torch.uint8, device=x.device)
    _encode(x, residual, bucket, out, scale, packed, (rows, count))
    return scale, packed


def mean_magnitudes(x: Tensor, bucket: int) -> Tensor:
    count = x.numel()
    bucket = max(1, min(bucket, count))
    means = torch.empty(cdiv(count, bucket), dtype=torch.float64, device=x.device)
    _encode(x, None, bucket, None, means, None, (1, count))
    return means


def _encode(
    x: Tensor,
    residual: Tensor | None,
    bucket: int,
    out: Tensor | None,
    scale: Tensor,
    packed: Tensor | None,
    shape: tuple[int, int],
    scale_at: int = 0,
    packed_at: int = 0,
) -> None:
    """Means of magnitudes into `scale`, signs into `packed`, what is lost into `out`.

    `scale` may be bytes: scales lie there from `scale_at` on. Signs start at `packed_at`.
    """
    rows, count = shape
    if not rows or not count:
        return
    x = x.contiguous()
    fed = x if residual is None else residual.contiguous()
    lost = x if out is None else out
    bits = x if packed is None else packed
    given: tuple[Tensor | int, ...]
    has = residual is not None, out is not None, packed is not None
    num_buckets = cdiv(count, bucket)
    if bucket <= _SMALL:
        wide = packed is not None and rows == 1 and (bits.data_ptr() + packed_at) % 4 == 0
        if _in_blocks(bucket):
            grid, how = _bucket_options(rows, count, bucket, wide, *has)
            given = x, fed, lost, bits, scale, count, num_buckets, scale_at, packed_at
            launch(encode_buckets, grid, *given, **how)
        else:
            grid, how = _small_options(rows, count, bucket, *has)
            given = x, fed, lost, bits, scale, count, bucket, num_buckets, scale_at, packed_at
            launch(encode_small, grid, *given, **how)
        return
    width = cdiv(bucket, _BLOCK)  # blocks of one bucket
    num_blocks = width * num_buckets
    sums = torch.empty(rows, num_blocks, dtype=torch.float64, device=x.device)
    wide = packed is not None and rows == 1 and (bits.data_ptr() + packed_at) % 4 == 0
    grid, how = _block_options(rows, count, bucket, wide, *has)
    given = x, fed, bits, sums, count, bucket, width, num_blocks, packed_at
    launch(encode_blocks, grid, *given, **how)
    sums, width = _fold_buckets(sums, rows * num_buckets, width)
    grid, how = _scale_options(rows, num_buckets, width)
    launch(scales, grid, sums, scale, count, bucket, width, scale_at, **how)
    if out is not None:
        grid, how = _lost_options(rows, count, num_buckets == 1, has[0])
        given = x, fed, lost, scale, count, bucket, num_buckets, scale_at
        launch(lost_of_signs, grid, *given, **how)


# Options depend on shapes alone, and are put together once for each.
Options = tuple[tuple[int, ...], dict[str, int | bool]]


def _in_blocks(bucket: int) -> bool:
    """Whether buckets are a power of two of blocks."""
    return bucket % _BLOCK == 0 and power_of_two(bucket) == bucket


@lru_cache(maxsize=256)
def _small_options(
    rows: int, count: int, bucket: int, fed: bool, has_out: bool, packs: bool
) -> Options:
    lanes = power_of_two(max(8, bucket))
    block = min(lanes, _BLOCK)
    buckets = max(1, _TILE // lanes)
    return (cdiv(cdiv(count, bucket), buckets), rows), {
        "BUCKETS": buckets,
        "BLOCKS": lanes // block,
        "BLOCK": block,
        "BUCKET_LEVELS": (lanes // block).bit_length() - 1,
        "BLOCK_LEVELS": block.bit_length() - 1,
        "FILLS": lanes == bucket,
        "HAS_RESIDUAL": fed,
        "HAS_OUT": has_out,
        "PACKS": packs,
        "ONE_ROW": rows == 1,  # its offset of zero is known to be aligned
    }


@lru_cache(maxsize=256)
def _bucket_options(
    rows: int, count: int, bucket: int, wide: bool, fed: bool, has_out: bool, packs: bool
) -> Options:
    blocks = bucket // _BLOCK
    return (cdiv(count, _TILE), rows), {
        "BLOCKS": _TILE // _BLOCK,
        "PER_BUCKET": blocks,
        "LEVELS": blocks.bit_length() - 1,
        "ONE_ROW": rows == 1,
        "WIDE": wide,
        "HAS_RESIDUAL": fed,
        "HAS_OUT": has_out,
        "PACKS": packs,
    }


@lru_cache(maxsize=256)
def _block_options(
    rows: int, count: int, bucket: int, wide: bool, fed: bool, has_out: bool, packs: bool
) -> Options:
    num_buckets, width = cdiv(count, bucket), cdiv(bucket, _BLOCK)
    return (cdiv(width * num_buckets, _TILE // _BLOCK), rows), {
        "FILLS": num_buckets == 1 or bucket % _BLOCK == 0,
        "BLOCKS": _TILE // _BLOCK,
        "ONE_ROW": rows == 1,
        "WIDE": wide,
        "HAS_RESIDUAL": fed,
        "PACKS": packs,
    }


@lru_cache(maxsize=256)
def _scale_options(rows: int, num_buckets: int, width: int) -> Options:
    size = power_of_two(width)
    return (num_buckets, rows), {"SIZE": size, "LEVELS": size.bit_length() - 1}


@lru_cache(maxsize=256)
def _lost_options(rows: int, count: int, single: bool, fed: bool) -> Options:
    return (cdiv(count, _TILE), rows), {
        "SINGLE": single,
        "HAS_RESIDUAL": fed,
        "ONE_ROW": rows == 1,
        "BLOCK": _TILE,
    }


def _fold_buckets(sums: Tensor, num_buckets: int, width: int) -> tuple[Tensor, int]:
    """Sums of which every bucket has `width`, added up until these are few, and how many."""
    while width > _FOLDED:
        size = power_of_two(width)
        folded = min(size // (_FOLDED // 2), 1024)
        left = size // folded
        columns = max(1, min(left, 4096 // folded // 2))
        out = torch.empty(num_buckets, left, dtype=torch.float64, device=sums.device)
        launch(
            fold_columns,
            (left // columns, num_buckets),
            sums,
            out,
            width,
            left,
            FOLDED=folded,
            LEVELS=folded.bit_length() - 1,
            COLUMNS=columns,
        )
        sums, width = out, left
    return sums, width
