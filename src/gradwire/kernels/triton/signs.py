"""Signs scaled by mean magnitudes, along the tree of reference/signs.py.

A bucket of up to _SMALL elements is done by one program, in one pass. Of longer buckets a first
kernel packs the signs and adds up blocks of 256, others add those, and the last one writes what is
lost: x and the residual are read twice. Rows of a matrix are vectors of their own. Means of what
was encoded are in _sign_means.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import cdiv, fold, launch, power_of_two, program_start
from gradwire.kernels.triton._sign_means import mean_signs as mean_signs

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
) -> None:
    """Means of magnitudes into `scale`, signs into `packed`, what is lost into `out`."""
    rows, count = shape
    if not rows or not count:
        return
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    given = x, x if residual is None else residual, x if out is None else out
    how = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_OUT": out is not None,
        "PACKS": packed is not None,
        "ONE_ROW": rows == 1,  # its offset of zero is known to be aligned
    }
    num_buckets, bits = cdiv(count, bucket), x if packed is None else packed
    if bucket <= _SMALL:
        lanes = power_of_two(max(8, bucket))
        block = min(lanes, _BLOCK)
        buckets = max(1, _TILE // lanes)
        launch(
            _encode_small,
            (cdiv(num_buckets, buckets), rows),
            *given,
            bits,
            scale,
            count,
            bucket,
            num_buckets,
            BUCKETS=buckets,
            BLOCKS=lanes // block,
            BLOCK=block,
            BUCKET_LEVELS=(lanes // block).bit_length() - 1,
            BLOCK_LEVELS=block.bit_length() - 1,
            FILLS=lanes == bucket,
            **how,
        )
        return
    width = cdiv(bucket, _BLOCK)  # blocks of one bucket
    num_blocks = width * num_buckets
    sums = torch.empty(rows, num_blocks, dtype=torch.float64, device=x.device)
    launch(
        _encode_blocks,
        (cdiv(num_blocks, _TILE // _BLOCK), rows),
        *given,
        bits,
        sums,
        count,
        bucket,
        width,
        num_blocks,
        FILLS=num_buckets == 1 or bucket % _BLOCK == 0,
        BLOCKS=_TILE // _BLOCK,
        WIDE=rows == 1 and bits.data_ptr() % 4 == 0,
        **how,
    )
    sums, width = _fold_buckets(sums, rows * num_buckets, width)
    size = power_of_two(width)
    launch(
        _scales,
        (num_buckets, rows),
        sums,
        scale,
        count,
        bucket,
        width,
        SIZE=size,
        LEVELS=size.bit_length() - 1,
    )
    if out is not None:
        launch(
            _lost,
            (cdiv(count, _TILE), rows),
            *given,
            scale,
            count,
            bucket,
            num_buckets,
            SINGLE=num_buckets == 1,
            HAS_RESIDUAL=residual is not None,
            ONE_ROW=rows == 1,
            BLOCK=_TILE,
        )


def _fold_buckets(sums: Tensor, num_buckets: int, width: int) -> tuple[Tensor, int]:
    """Sums of which every bucket has `width`, added up until these are few, and how many."""
    while width > _FOLDED:
        size = power_of_two(width)
        folded = min(size // (_FOLDED // 2), 1024)
        left = size // folded
        columns = max(1, min(left, 4096 // folded // 2))
        out = torch.empty(num_buckets, left, dtype=torch.float64, device=sums.device)
        launch(
            _fold_columns,
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


@triton.jit
def _load_sum(x, residual, at, mask, is_whole, HAS_RESIDUAL: tl.constexpr):
    if is_whole:
        p = tl.load(x + at)
        if HAS_RESIDUAL:
            p = p + tl.load(residual + at)
    else:
        p = tl.load(x + at, mask=mask, other=0)
        if HAS_RESIDUAL:
            p = p + tl.load(residual + at, mask=mask, other=0)
    return p


@triton.jit
def _bytes_of(p, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Sign bits of [ROWS, LANES] elements: [ROWS, LANES / 8]."""
    bits = tl.reshape((p < 0).to(tl.int32), (ROWS, LANES // 8, 8))
    return tl.sum(bits << tl.arange(0, 8)[None, None, :], axis=2).to(tl.uint8)


@triton.jit
def _encode_small(
    x,
    residual,
    out,
    packed,
    scale,
    count,
    bucket,
    num_buckets,
    BUCKETS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BUCKET_LEVELS: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
    FILLS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OUT: tl.constexpr,
    PACKS: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Of several buckets all at once; FILLS if a bucket has as many elements as lanes."""
    LANES: tl.constexpr = BLOCKS * BLOCK
    row = tl.program_id(1).to(tl.int64)
    b = program_start(BUCKETS) + tl.arange(0, BUCKETS)
    lane = tl.arange(0, LANES)
    within = b[:, None] * bucket + lane[None, :]
    mask = (lane < bucket)[None, :] & (within < count)
    whole = FILLS & ((program_start(BUCKETS) + BUCKETS) * bucket <= count)
    at = within if ONE_ROW else row * count + within
    p = _load_sum(x, residual, at, mask, whole, HAS_RESIDUAL)
    sums = fold(tl.abs(p).to(tl.float64), BUCKETS * BLOCKS, BLOCK, BLOCK_LEVELS)
    sums = fold(sums, BUCKETS, BLOCKS, BUCKET_LEVELS)
    sizes = tl.maximum(tl.minimum(count - b * bucket, bucket), 1)
    mean = (sums / sizes.to(tl.float64)).to(scale.dtype.element_ty)
    tl.store(scale + row * num_buckets + b, mean, mask=b < num_buckets)
    if PACKS:
        byte = 8 * tl.arange(0, LANES // 8)
        first = b[:, None] * bucket + byte[None, :]
        has_byte = (byte < bucket)[None, :] & (first < count)
        to = packed + row * ((count + 7) // 8) + first // 8
        tl.store(to, _bytes_of(p, BUCKETS, LANES), mask=has_byte)
    if HAS_OUT:
        lost = p - tl.where(p < 0, -mean[:, None], mean[:, None])
        if whole:
            tl.store(out + at, lost)
        else:
            tl.store(out + at, lost, mask=mask)


@triton.jit
def _part(
    x,
    residual,
    bits,
    base,
    start,
    end,
    WHOLE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PACKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Magnitudes of 32 elements of each block, whose signs are stored: a word, or four bytes."""
    lane = tl.arange(0, 32)
    within = start[:, None] + lane[None, :]
    p = _load_sum(x, residual, base + within, within < end[:, None], WHOLE, HAS_RESIDUAL)
    if PACKS:
        word = tl.sum((p < 0).to(tl.int32) << lane[None, :], axis=1)
        if WIDE and WHOLE:
            tl.store(bits.to(tl.pointer_type(tl.int32)) + start // 32, word)
        else:
            byte = 8 * tl.arange(0, 4)[None, :]
            at = start[:, None] + byte
            tl.store(bits + at // 8, (word[:, None] >> byte).to(tl.uint8), mask=at < end[:, None])
    return tl.abs(p).to(tl.float64)


@triton.jit
def _sum_of_parts(
    x,
    residual,
    bits,
    base,
    first,
    end,
    WHOLE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PACKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The first three levels of the tree: [blocks, 32]."""
    p0 = _part(x, residual, bits, base, first, end, WHOLE, HAS_RESIDUAL, PACKS, WIDE)
    p1 = _part(x, residual, bits, base, first + 32, end, WHOLE, HAS_RESIDUAL, PACKS, WIDE)
    p2 = _part(x, residual, bits, base, first + 64, end, WHOLE, HAS_RESIDUAL, PACKS, WIDE)
    p3 = _part(x, residual, bits, base, first + 96, end, WHOLE, HAS_RESIDUAL, PACKS, WIDE)
    p0 += _part(x, residual, bits, base, first + 128, end, WHOLE, HAS_RESIDUAL, PACKS, WIDE)
    p1 += _part(x, residual, bits, base, first + 160, end, WHOLE, HAS_RESIDUAL, PACKS, WIDE)
    p2 += _part(x, residual, bits, base, first + 192, end, WHOLE, HAS_RESIDUAL, PACKS, WIDE)
    p3 += _part(x, residual, bits, base, first + 224, end, WHOLE, HAS_RESIDUAL, PACKS, WIDE)
    return (p0 + p2) + (p1 + p3)


@triton.jit
def _encode_blocks(
    x,
    residual,
    out,
    packed,
    sums,
    count,
    bucket,
    width,
    num_blocks,
    FILLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OUT: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Sums of blocks of 256, and signs; FILLS if no block but the last ends before its lanes do.

    A block is loaded in eight parts of 32 lanes. The first three levels of its tree add parts, so
    they stay inside of a thread, and the signs of a part are one word.
    """
    row = tl.program_id(1).to(tl.int64)
    j = program_start(BLOCKS) + tl.arange(0, BLOCKS)
    base = 0 if ONE_ROW else row * count
    bits = packed if ONE_ROW else packed + row * ((count + 7) // 8)
    if FILLS:
        first = j * 256
        end = tl.minimum(first + 256, count)
    else:
        first = (j // width) * bucket + (j % width) * 256
        end = tl.minimum(tl.minimum(first + 256, (j // width + 1) * bucket), count)
        end = tl.where(j < num_blocks, end, 0)
    whole = FILLS & ((program_start(BLOCKS) + BLOCKS) * 256 <= count)
    # Without masks the loads of all parts are under way at once.
    if whole:
        parts = _sum_of_parts(x, residual, bits, base, first, end, True, HAS_RESIDUAL, PACKS, WIDE)
    else:
        parts = _sum_of_parts(x, residual, bits, base, first, end, False, HAS_RESIDUAL, PACKS, WIDE)
    total = fold(parts, BLOCKS, 32, 5)
    tl.store(sums + row * num_blocks + j, total, mask=j < num_blocks)


@triton.jit
def _fold_columns(
    sums,
    out,
    width,
    left,
    FOLDED: tl.constexpr,
    LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The first levels of the tree of a bucket's sums: [FOLDED, left] to [left]."""
    bucket = tl.program_id(1).to(tl.int64)
    column = program_start(COLUMNS) + tl.arange(0, COLUMNS)
    at = tl.arange(0, FOLDED)[:, None] * left + column[None, :]
    x = tl.load(sums + bucket * width + at, mask=at < width, other=0)
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (2, FOLDED >> (level + 1), COLUMNS)), axis=0)
    tl.store(out + bucket * left + column, tl.reshape(x, (COLUMNS,)))


@triton.jit
def _scales(sums, scale, count, bucket, width, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """The mean of each bucket, of its last sums."""
    b = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + b
    lane = tl.arange(0, SIZE)
    x = tl.load(sums + at * width + lane, mask=lane < width, other=0)
    total = fold(x, 1, SIZE, LEVELS)
    size = tl.minimum(count - b * bucket, bucket).to(tl.float64)
    mean = (total / size).to(scale.dtype.element_ty)
    tl.store(scale + at + tl.arange(0, 1), mean)


@triton.jit
def _lost(
    x,
    residual,
    out,
    scale,
    count,
    bucket,
    num_buckets,
    SINGLE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What decodes to less or more than there was."""
    row = tl.program_id(1).to(tl.int64)
    # From the end on: the kernel before has left that in the cache.
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK
    within = start + tl.arange(0, BLOCK)
    mask = within < count
    whole = start + BLOCK <= count
    at = within if ONE_ROW else row * count + within
    p = _load_sum(x, residual, at, mask, whole, HAS_RESIDUAL)
    if SINGLE:
        s = tl.load(scale + row)
    else:
        s = tl.load(scale + row * num_buckets + within // bucket, mask=mask, other=0)
    lost = p - tl.where(p < 0, -s, s)
    if whole:
        tl.store(out + at, lost)
    else:
        tl.store(out + at, lost, mask=mask)
