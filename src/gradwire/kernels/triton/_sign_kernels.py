"""The kernels of signs.py, which says in which order they run."""

import triton
import triton.language as tl

from gradwire.kernels.triton._common import fold, program_start


@triton.jit
def scales_at(memory, at):
    """Scales in memory of theirs, or float32 from byte `at` of a buffer on."""
    if memory.dtype.element_ty == tl.uint8:
        place = (memory + at).to(tl.pointer_type(tl.float32))
    else:
        place = memory
    return place


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
def encode_small(
    x,
    residual,
    out,
    packed,
    scale,
    count,
    bucket,
    num_buckets,
    scale_at,
    packed_at,
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
    scale = scales_at(scale, scale_at)
    mean = (sums / sizes.to(tl.float64)).to(scale.dtype.element_ty)
    tl.store(scale + row * num_buckets + b, mean, mask=b < num_buckets)
    if PACKS:
        byte = 8 * tl.arange(0, LANES // 8)
        first = b[:, None] * bucket + byte[None, :]
        has_byte = (byte < bucket)[None, :] & (first < count)
        to = packed + packed_at + row * ((count + 7) // 8) + first // 8
        tl.store(to, _bytes_of(p, BUCKETS, LANES), mask=has_byte)
    if HAS_OUT:
        lost = p - tl.where(p < 0, -mean[:, None], mean[:, None])
        if whole:
            tl.store(out + at, lost)
        else:
            tl.store(out + at, lost, mask=mask)


@triton.jit
def _part(x, residual, base, start, end, WHOLE: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """32 elements of each block: [blocks, 32]."""
    within = start[:, None] + tl.arange(0, 32)[None, :]
    return _load_sum(x, residual, base + within, within < end[:, None], WHOLE, HAS_RESIDUAL)


@triton.jit
def _magnitudes(p, bits, start, end, WHOLE: tl.constexpr, PACKS: tl.constexpr, WIDE: tl.constexpr):
    """Of a part, whose signs are stored: a word of each block, or four bytes."""
    if PACKS:
        word = tl.sum((p < 0).to(tl.int32) << tl.arange(0, 32)[None, :], axis=1)
        if WIDE and WHOLE:
            tl.store(bits.to(tl.pointer_type(tl.int32)) + start // 32, word)
        else:
            byte = 8 * tl.arange(0, 4)[None, :]
            at = start[:, None] + byte
            tl.store(bits + at // 8, (word[:, None] >> byte).to(tl.uint8), mask=at < end[:, None])
    return tl.abs(p).to(tl.float64)


@triton.jit
def _store_lost(p, out, s, base, start, end, WHOLE: tl.constexpr):
    within = start[:, None] + tl.arange(0, 32)[None, :]
    lost = p - tl.where(p < 0, -s[:, None], s[:, None])
    if WHOLE:
        tl.store(out + base + within, lost)
    else:
        tl.store(out + base + within, lost, mask=within < end[:, None])


@triton.jit
def _blocks(
    x,
    residual,
    out,
    bits,
    scale,
    base,
    first,
    end,
    b,
    count,
    num_buckets,
    BLOCKS: tl.constexpr,
    PER_BUCKET: tl.constexpr,
    LEVELS: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OUT: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Sums of blocks of 256; with PER_BUCKET > 0 means of buckets of so many blocks, stored, too.

    A block is loaded in eight parts of 32 lanes. The first three levels of its tree add parts, so
    they stay inside of a thread, and the signs of a part are one word.
    """
    p0 = _part(x, residual, base, first, end, WHOLE, HAS_RESIDUAL)
    p1 = _part(x, residual, base, first + 32, end, WHOLE, HAS_RESIDUAL)
    p2 = _part(x, residual, base, first + 64, end, WHOLE, HAS_RESIDUAL)
    p3 = _part(x, residual, base, first + 96, end, WHOLE, HAS_RESIDUAL)
    p4 = _part(x, residual, base, first + 128, end, WHOLE, HAS_RESIDUAL)
    p5 = _part(x, residual, base, first + 160, end, WHOLE, HAS_RESIDUAL)
    p6 = _part(x, residual, base, first + 192, end, WHOLE, HAS_RESIDUAL)
    p7 = _part(x, residual, base, first + 224, end, WHOLE, HAS_RESIDUAL)
    m0 = _magnitudes(p0, bits, first, end, WHOLE, PACKS, WIDE)
    m1 = _magnitudes(p1, bits, first + 32, end, WHOLE, PACKS, WIDE)
    m2 = _magnitudes(p2, bits, first + 64, end, WHOLE, PACKS, WIDE)
    m3 = _magnitudes(p3, bits, first + 96, end, WHOLE, PACKS, WIDE)
    m0 += _magnitudes(p4, bits, first + 128, end, WHOLE, PACKS, WIDE)
    m1 += _magnitudes(p5, bits, first + 160, end, WHOLE, PACKS, WIDE)
    m2 += _magnitudes(p6, bits, first + 192, end, WHOLE, PACKS, WIDE)
    m3 += _magnitudes(p7, bits, first + 224, end, WHOLE, PACKS, WIDE)
    sums = fold((m0 + m2) + (m1 + m3), BLOCKS, 32, 5)
    if PER_BUCKET > 0:
        BUCKETS: tl.constexpr = BLOCKS // PER_BUCKET
        totals = fold(sums, BUCKETS, PER_BUCKET, LEVELS)
        sizes = tl.maximum(tl.minimum(count - b * (PER_BUCKET * 256), PER_BUCKET * 256), 1)
        mean = (totals / sizes.to(tl.float64)).to(scale.dtype.element_ty)
        tl.store(scale + b, mean, mask=b < num_buckets)
        if HAS_OUT:
            s = tl.reshape(tl.broadcast_to(mean[:, None], (BUCKETS, PER_BUCKET)), (BLOCKS,))
            _store_lost(p0, out, s, base, first, end, WHOLE)
            _store_lost(p1, out, s, base, first + 32, end, WHOLE)
            _store_lost(p2, out, s, base, first + 64, end, WHOLE)
            _store_lost(p3, out, s, base, first + 96, end, WHOLE)
            _store_lost(p4, out, s, base, first + 128, end, WHOLE)
            _store_lost(p5, out, s, base, first + 160, end, WHOLE)
            _store_lost(p6, out, s, base, first + 192, end, WHOLE)
            _store_lost(p7, out, s, base, first + 224, end, WHOLE)
    return sums


@triton.jit
def encode_buckets(
    x,
    residual,
    out,
    packed,
    scale,
    count,
    num_buckets,
    scale_at,
    packed_at,
    BLOCKS: tl.constexpr,
    PER_BUCKET: tl.constexpr,
    LEVELS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OUT: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Of buckets of PER_BUCKET = 2^LEVELS blocks of 256 all at once."""
    row = tl.program_id(1).to(tl.int64)
    first = (program_start(BLOCKS) + tl.arange(0, BLOCKS)) * 256
    end = tl.minimum(first + 256, count)
    b = program_start(BLOCKS // PER_BUCKET) + tl.arange(0, BLOCKS // PER_BUCKET)
    base = 0 if ONE_ROW else row * count
    bits = packed + packed_at if ONE_ROW else packed + packed_at + row * ((count + 7) // 8)
    scales = scales_at(scale, scale_at) + row * num_buckets
    # Without masks the loads of all parts are under way at once.
    if (program_start(BLOCKS) + BLOCKS) * 256 <= count:
        _blocks(
            x, residual, out, bits, scales, base, first, end, b, count, num_buckets,
            BLOCKS, PER_BUCKET, LEVELS, True, WIDE, HAS_RESIDUAL, HAS_OUT, PACKS,
        )  # fmt: skip
    else:
        _blocks(
            x, residual, out, bits, scales, base, first, end, b, count, num_buckets,
            BLOCKS, PER_BUCKET, LEVELS, False, WIDE, HAS_RESIDUAL, HAS_OUT, PACKS,
        )  # fmt: skip


@triton.jit
def encode_blocks(
    x,
    residual,
    packed,
    sums,
    count,
    bucket,
    width,
    num_blocks,
    packed_at,
    FILLS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PACKS: tl.constexpr,
):
    """Sums of blocks of 256, and signs; FILLS if no block but the last ends before its lanes do."""
    row = tl.program_id(1).to(tl.int64)
    j = program_start(BLOCKS) + tl.arange(0, BLOCKS)
    base = 0 if ONE_ROW else row * count
    bits = packed + packed_at if ONE_ROW else packed + packed_at + row * ((count + 7) // 8)
    if FILLS:
        first = j * 256
        end = tl.minimum(first + 256, count)
    else:
        first = (j // width) * bucket + (j % width) * 256
        end = tl.minimum(tl.minimum(first + 256, (j // width + 1) * bucket), count)
        end = tl.where(j < num_blocks, end, 0)
    # Without masks the loads of all parts are under way at once.
    if FILLS & ((program_start(BLOCKS) + BLOCKS) * 256 <= count):
        total = _blocks(
            x, residual, x, bits, x, base, first, end, j, count, 0,
            BLOCKS, 0, 0, True, WIDE, HAS_RESIDUAL, False, PACKS,
        )  # fmt: skip
    else:
        total = _blocks(
            x, residual, x, bits, x, base, first, end, j, count, 0,
            BLOCKS, 0, 0, False, WIDE, HAS_RESIDUAL, False, PACKS,
        )  # fmt: skip
    tl.store(sums + row * num_blocks + j, total, mask=j < num_blocks)


@triton.jit
def fold_columns(
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
def scales(sums, scale, count, bucket, width, scale_at, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """The mean of each bucket, of its last sums."""
    b = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + b
    lane = tl.arange(0, SIZE)
    x = tl.load(sums + at * width + lane, mask=lane < width, other=0)
    size = tl.minimum(count - b * bucket, bucket)
    scale = scales_at(scale, scale_at)
    mean = (fold(x, 1, SIZE, LEVELS) / size.to(tl.float64)).to(scale.dtype.element_ty)
    tl.store(scale + at + tl.arange(0, 1), mean)


@triton.jit
def lost(
    x,
    residual,
    out,
    scale,
    count,
    bucket,
    num_buckets,
    scale_at,
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
    scale = scales_at(scale, scale_at)
    if SINGLE:
        s = tl.load(scale + row)
    else:
        s = tl.load(scale + row * num_buckets + within // bucket, mask=mask, other=0)
    lost = p - tl.where(p < 0, -s, s)
    if whole:
        tl.store(out + at, lost)
    else:
        tl.store(out + at, lost, mask=mask)
