"""Candidates for a selection: elements whose magnitude reaches a threshold, in ascending order.

    sample    a threshold that a little more than the largest `rank` elements are likely to reach
    mark      one pass: forms p = x + residual, writes it and a bit for each element that reaches
              the threshold, and counts those of each tile
    collect   positions and values of the marked elements

Magnitudes are compared as integers, the bits of a float32 without its sign; NaN counts as infinity.
All kernels have rows as the second axis of their grid: row r of each matrix is a selection of its
own. `head` is [rows, HEAD] int32: the threshold, the number of candidates, then what ranks them.
`marks` is [rows, tiles (WORDS + 1)] int32: the bits, and behind them how many each tile has.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton._common import load_block, store_block

HEAD = 4096  # int32 of a row: threshold, number of candidates; states; counts of digits, of bins
STATES = 16  # where the prefix and the rank left at each digit begin
DIGITS = 64  # where the counts of the digits begin, 256 of each of four
BINS = 2048  # how many bins, and where their counts begin: equal ranges above the threshold
STATS = 128  # int64 of a row: see gaps.py
TILE_WORDS = 128  # of 32 elements each
INFINITY = tl.constexpr(0x7F800000)
_BINS = tl.constexpr(BINS)


@triton.jit
def form(
    x,
    residual,
    velocity,
    at,
    count,
    is_whole,
    momentum,
    scale,
    KIND: tl.constexpr,
    NESTEROV: tl.constexpr,
):
    """p at some positions, and the new velocity. KIND 0: p = x; 1: x + residual; 2: a motion."""
    p = load_block(x, at, count, is_whole)
    moved = p
    if KIND == 1:
        p = p + load_block(residual, at, count, is_whole)
    if KIND == 2:
        gradient = p * scale
        moved = load_block(velocity, at, count, is_whole) * momentum + gradient
        step = moved
        if NESTEROV:
            step = gradient + moved * momentum
        p = step + load_block(residual, at, count, is_whole)
    return p, moved


@triton.jit
def form_some(
    x,
    residual,
    velocity,
    at,
    mask,
    momentum,
    scale,
    KIND: tl.constexpr,
    NESTEROV: tl.constexpr,
):
    """p at the positions of a mask, wherever they are."""
    p = tl.load(x + at, mask=mask, other=0)
    if KIND == 1:
        p = p + tl.load(residual + at, mask=mask, other=0)
    if KIND == 2:
        gradient = p * scale
        moved = tl.load(velocity + at, mask=mask, other=0) * momentum + gradient
        step = moved
        if NESTEROV:
            step = gradient + moved * momentum
        p = step + tl.load(residual + at, mask=mask, other=0)
    return p


@triton.jit
def magnitude(p):
    return tl.minimum(p.to(tl.int32, bitcast=True) & 0x7FFFFFFF, INFINITY)


@triton.jit
def ones_in(word):
    """How many bits of uint32 words are one, int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def bits_of_rank(bits, is_item, count, rank, base, LOWEST: tl.constexpr):
    """The least magnitude of the `rank` largest of `count` items, which all reach `base`. If LOWEST
    is not 0 at most that, and less than 2^LOWEST less or reached by no other item.

    Two bits at a time, in one sum of three counts of at most 2^16 - 1 items each: what takes time
    is that all warps of a program wait for each other. It begins with the highest bit that some
    item has above `base`, and ends when exactly `rank` items are left.
    """
    above = bits - base
    span = tl.maximum(tl.max(tl.where(is_item, above, 0)), 0)
    # How many bits that has, from the exponent; a number that is rounded up has one more.
    left = tl.maximum((span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)
    prefix = tl.full([], 0, tl.int32)
    one = tl.full([], 1, tl.int32)
    reach = prefix + count
    while (left > LOWEST) & (reach != rank):
        left = tl.maximum(left - 2, LOWEST)
        step = one << left
        # A number reaches the second only if it reaches the first.
        reached = (above >= prefix + step).to(tl.int64)
        reached += (above >= prefix + 2 * step).to(tl.int64) << 16
        reached += (above >= prefix + 3 * step).to(tl.int64) << 32
        counts = tl.sum(tl.where(is_item, reached, 0))
        for i in tl.static_range(3):
            those = ((counts >> (16 * i)) & 0xFFFF).to(tl.int32)
            reach = tl.where(those >= rank, those, reach)
            prefix += tl.where(those >= rank, step, 0)
    if LOWEST == 0:  # of as many as `rank` the least
        prefix = tl.min(tl.where(is_item & (above >= prefix), above, 0x7FFFFFFF))
    return prefix + base


@triton.jit
def row_of(pointer, size, BATCH: tl.constexpr):
    """The program's row of a matrix; the compiler knows the alignment of the only one."""
    if BATCH:
        pointer += tl.program_id(1).to(tl.int64) * size
    return pointer


@triton.jit(do_not_specialize=["n", "rank"])
def sample(
    x,
    residual,
    velocity,
    head,
    stats,
    n,
    rank,
    momentum,
    scale,
    KIND: tl.constexpr,
    NESTEROV: tl.constexpr,
    BATCH: tl.constexpr,
    SAMPLES: tl.constexpr,
    RUN: tl.constexpr,
    HEAD: tl.constexpr,
    STATS: tl.constexpr,
):
    """One program for each row; the sample is of runs at equal distances. Clears head and stats."""
    x = row_of(x, n, BATCH)
    residual = row_of(residual, n, BATCH)
    velocity = row_of(velocity, n, BATCH)
    lane = tl.arange(0, SAMPLES)
    at = (lane // RUN).to(tl.int64) * (n // (SAMPLES // RUN)) + lane % RUN
    p = form_some(x, residual, velocity, at, at < n, momentum, scale, KIND, NESTEROV)
    threshold = bits_of_rank(magnitude(p), lane < SAMPLES, SAMPLES, rank, 0, 11)
    place = tl.arange(0, HEAD)
    tl.store(row_of(head, HEAD, BATCH) + place, tl.where(place == 0, threshold, 0))
    place = tl.arange(0, STATS)
    tl.store(row_of(stats, STATS, BATCH) + place, tl.zeros([STATS], tl.int64))


@triton.jit(do_not_specialize=["n", "threshold"])
def mark(
    x,
    residual,
    velocity,
    moved,
    out,
    head,
    marks,
    n,
    threshold,
    momentum,
    scale,
    KIND: tl.constexpr,
    NESTEROV: tl.constexpr,
    MASKS: tl.constexpr,
    HAS_OUT: tl.constexpr,
    CLEAR: tl.constexpr,
    BATCH: tl.constexpr,
    HEAD: tl.constexpr,
    WORDS: tl.constexpr,
):
    """A program for each tile of 32 WORDS elements. The threshold is that of `head`, or if CLEAR
    the argument; then the candidates are selected, and taken out of what is left."""
    x = row_of(x, n, BATCH)
    residual = row_of(residual, n, BATCH)
    velocity = row_of(velocity, n, BATCH)
    tile = tl.program_id(0)
    first = tile.to(tl.int64) * (32 * WORDS)
    word = tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    at = first + word[:, None] * 32 + bit[None, :]
    is_whole = first + 32 * WORDS <= n
    p, u = form(x, residual, velocity, at, n, is_whole, momentum, scale, KIND, NESTEROV)
    if not CLEAR:
        threshold = tl.load(row_of(head, HEAD, BATCH))
    hit = (magnitude(p) >= threshold) & (at < n)
    if HAS_OUT:
        left = p
        if CLEAR:
            left = tl.where(hit, 0.0, p)
        store_block(row_of(out, n, BATCH), at, left, n, is_whole)
    if KIND == 2:
        if CLEAR and MASKS:
            u = tl.where(hit, 0.0, u)
        store_block(row_of(moved, n, BATCH), at, u, n, is_whole)
    tiles = tl.num_programs(0)
    words = tl.sum(hit.to(tl.int32) << bit[None, :], axis=1)
    marks = row_of(marks, tiles * (WORDS + 1), BATCH)
    tl.store(marks + tile.to(tl.int64) * WORDS + word, words)
    tl.store(marks + tiles.to(tl.int64) * WORDS + tile, tl.sum(hit.to(tl.int32)))


@triton.jit
def bin_of(bits, threshold, bin_shift):
    """The bin of a magnitude that reaches the threshold; the last has all that is larger."""
    return tl.minimum((bits - threshold) >> bin_shift, _BINS - 1)


@triton.jit
def sum_before(counts, end):
    """The sum of the first `end` numbers, int64."""
    lane = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.int64)
    for start in range(0, end, 1024):
        at = start + lane
        total += tl.load(counts + at, mask=at < end, other=0).to(tl.int64)
    return tl.sum(total)


@triton.jit(do_not_specialize=["n", "num_tiles", "span", "capacity", "bin_shift"])
def collect(
    x,
    residual,
    velocity,
    head,
    stats,
    marks,
    positions,
    values,
    n,
    num_tiles,
    span,
    capacity,
    bin_shift,
    momentum,
    scale,
    KIND: tl.constexpr,
    NESTEROV: tl.constexpr,
    BATCH: tl.constexpr,
    HEAD: tl.constexpr,
    STATS: tl.constexpr,
    WORDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """A program for each `span` tiles. Writes as many candidates as there is room for, and if
    COUNTS adds them to the counts of their bins."""
    x = row_of(x, n, BATCH)
    residual = row_of(residual, n, BATCH)
    velocity = row_of(velocity, n, BATCH)
    bitmap = row_of(marks, num_tiles.to(tl.int64) * (WORDS + 1), BATCH)
    counts = bitmap + num_tiles.to(tl.int64) * WORDS
    positions = row_of(positions, capacity, BATCH)
    values = row_of(values, capacity, BATCH)
    first_tile = tl.program_id(0) * span
    end_tile = tl.minimum(first_tile + span, num_tiles)
    slot = sum_before(counts, first_tile)
    lane = tl.arange(0, AT_ONCE)
    end = end_tile.to(tl.int64) * WORDS
    spoiled = tl.zeros([AT_ONCE], tl.int32)
    head = row_of(head, HEAD, BATCH)
    if COUNTS:
        threshold = tl.load(head)
    for start in range(first_tile.to(tl.int64) * WORDS, end, AT_ONCE):
        number = start + lane
        words = tl.load(bitmap + number, mask=number < end, other=0).to(tl.uint32, bitcast=True)
        ones = ones_in(words)
        place = slot + tl.cumsum(ones, 0) - ones
        for _ in range(tl.max(ones)):
            lowest = words & (0 - words)
            at = number * 32 + ones_in(lowest - 1)
            kept = (words != 0) & (place < capacity)
            p = form_some(x, residual, velocity, at, kept, momentum, scale, KIND, NESTEROV)
            tl.store(positions + place, at, mask=kept)
            tl.store(values + place, p, mask=kept)
            bits = magnitude(p)
            spoiled += (kept & (bits == INFINITY)).to(tl.int32)
            if COUNTS:
                count = head + _BINS + bin_of(bits, threshold, bin_shift)
                tl.atomic_add(count, tl.full([AT_ONCE], 1, tl.int32), mask=kept, sem="relaxed")
            words = words & (words - 1)
            place += 1
        slot += tl.sum(ones)
    stats = row_of(stats, STATS, BATCH)
    total = tl.sum(spoiled)
    if total > 0:
        tl.atomic_add(stats + 1, total.to(tl.int64), sem="relaxed")
    if end_tile == num_tiles:
        tl.store(head + 1, tl.minimum(slot, 2147483647).to(tl.int32))
        tl.store(stats, slot)
