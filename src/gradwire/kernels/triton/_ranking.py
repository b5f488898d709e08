"""The largest of some candidates, of equal ones the first, in ascending order of positions.

Few of them fit into one program (`keep_few`), which bisects the bits of the least magnitude that is
kept. Of many the same bits are found digit by digit, 8, 8, 8 and 7 of them, from counts of
candidates that share the digits before (`count_digits`); then each block of candidates is counted
(`count_kept`) and written behind the blocks before it (`keep_many`).
"""

import triton
import triton.language as tl

from gradwire.kernels.triton._candidates import (
    DIGITS,
    INFINITY,
    STATES,
    bits_of_rank,
    form,
    form_some,
    magnitude,
    row_of,
    sum_before,
)
from gradwire.kernels.triton._common import KEY_WORDS, store_block
from gradwire.kernels.triton._gap_kernels import count_lengths, first_parameter, gaps_before
from gradwire.kernels.triton.strata import strata_block

SHIFTS = (23, 15, 7, 0)
_STATES = tl.constexpr(STATES)
_DIGITS = tl.constexpr(DIGITS)


@triton.jit(do_not_specialize=["n", "rank", "capacity"])
def keep_few(
    x,
    residual,
    velocity,
    moved,
    out,
    head,
    stats,
    positions,
    candidates,
    indices,
    values,
    sums,
    n,
    rank,
    capacity,
    momentum,
    scale,
    KIND: tl.constexpr,
    NESTEROV: tl.constexpr,
    MASKS: tl.constexpr,
    HAS_OUT: tl.constexpr,
    BATCH: tl.constexpr,
    HEAD: tl.constexpr,
    STATS: tl.constexpr,
    DIRECT: tl.constexpr,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each row, of a vector of at most TILE elements (DIRECT) or of candidates; if
    CAPPED of all of them where they are fewer than `rank`. Measures their gaps as well, as
    `launch_measure` does for longer vectors: CHUNK is its own, or TILE if that is less."""
    size = rank
    x = row_of(x, n, BATCH)
    out = row_of(out, n, BATCH)
    moved = row_of(moved, n, BATCH)
    stats = row_of(stats, STATS, BATCH)
    lane = tl.arange(0, TILE)
    if DIRECT:
        residual = row_of(residual, n, BATCH)
        velocity = row_of(velocity, n, BATCH)
        found = n
        at = lane.to(tl.int64)
        p, u = form(x, residual, velocity, at, n, n == TILE, momentum, scale, KIND, NESTEROV)
        is_item = lane < n
        place = tl.arange(0, STATS)
        zeros = tl.zeros([STATS], tl.int64)
        tl.store(stats + place, tl.where(place == 0, zeros + n, zeros))
        tl.debug_barrier()
        base = 0
    else:
        base = tl.load(row_of(head, HEAD, BATCH))  # which all candidates reach
        found = tl.load(row_of(head, HEAD, BATCH) + 1)
        if CAPPED:
            rank = tl.minimum(rank, found)
        # Of too few or too many nothing is kept: the host reads it from `stats`.
        found = tl.where((found >= rank) & (found <= capacity), found, 0)
        is_item = lane < found
        p = tl.load(row_of(candidates, capacity, BATCH) + lane, mask=is_item, other=0)
    bits = magnitude(p)
    least = bits_of_rank(bits, is_item, found, rank, base, 0)
    above = (is_item & (bits > least)).to(tl.int32)
    equal = (is_item & (bits == least)).to(tl.int32)
    ties = rank - tl.sum(above)
    seen = tl.cumsum(above | (equal << 16), 0)
    taken = (above > 0) | ((equal > 0) & ((seen >> 16) <= ties))
    place = (seen & 0xFFFF) + tl.minimum(seen >> 16, ties) - 1
    indices = row_of(indices, size, BATCH)
    if not DIRECT:  # not sooner: they take twice the registers of the rest
        at = tl.load(row_of(positions, capacity, BATCH) + lane, mask=taken, other=0)
    tl.store(indices + place, at, mask=taken)
    tl.store(row_of(values, size, BATCH) + place, p, mask=taken)
    if DIRECT:
        if HAS_OUT:
            store_block(out, at, tl.where(taken, 0.0, p), n, n == TILE)
        if KIND == 2:
            if MASKS:
                u = tl.where(taken, 0.0, u)
            store_block(moved, at, u, n, n == TILE)
    else:
        if HAS_OUT:
            tl.store(out + at, tl.zeros_like(p), mask=taken)
        if KIND == 2 and MASKS:
            tl.store(moved + at, tl.zeros_like(p), mask=taken)
    tl.store(stats + 1, tl.sum((taken & (bits == INFINITY)).to(tl.int64)))
    tl.debug_barrier()  # the indices are read by other threads than have written them
    count = tl.sum(taken.to(tl.int32))
    sums = row_of(sums, (size + CHUNK - 1) // CHUNK * 3, BATCH)
    _measure_kept(indices, sums, stats, count, size, CHUNK)


@triton.jit
def _measure_kept(indices, sums, stats, count, size, CHUNK: tl.constexpr):
    last = tl.load(indices + count - 1, mask=count > 0, other=0)
    first = first_parameter(last, count)
    chunks = (size + CHUNK - 1) // CHUNK
    lane = tl.arange(0, CHUNK)
    length = tl.arange(0, 64)
    lengths = tl.zeros([64], tl.int64)
    total_0 = tl.full([], 0, tl.int64)
    total_1 = total_0
    total_2 = total_0
    for chunk in range(chunks):
        at = chunk * CHUNK + lane
        mask = at < count
        gap = tl.where(mask, gaps_before(indices, at, mask), 0)
        sum_0 = tl.sum(gap >> first)
        sum_1 = tl.sum(gap >> (first + 1))
        sum_2 = tl.sum(gap >> (first + 2))
        tl.store(sums + chunk, sum_0)
        tl.store(sums + chunks + chunk, sum_1)
        tl.store(sums + 2 * chunks + chunk, sum_2)
        total_0 += sum_0
        total_1 += sum_1
        total_2 += sum_2
        lengths += count_lengths(gap, mask)
    tl.store(stats + 2, last)
    tl.store(stats + 4, total_0)
    tl.store(stats + 5, total_1)
    tl.store(stats + 6, total_2)
    tl.store(stats + 8 + length, lengths, mask=length < 63)


@triton.jit
def _state_after(head, rank, LEVEL: tl.constexpr):
    """The bits known after LEVEL digits, and how many of those that share them are kept. Of fewer
    than `rank` candidates all are."""
    if LEVEL == 0:
        prefix = tl.full([], 0, tl.int32)
        left = tl.minimum(tl.load(head + 1), rank)
    else:
        state = head + _STATES + 2 * LEVEL
        before, wanted = tl.load(state), tl.load(state + 1)
        digit = tl.arange(0, 256)
        counts = tl.load(head + _DIGITS + 256 * (LEVEL - 1) + digit)
        reach = tl.sum(counts) - tl.cumsum(counts, 0) + counts  # this digit or a larger one
        best = tl.max(tl.where(reach >= wanted, digit, 0))
        left = wanted - tl.sum(tl.where(digit > best, counts, 0))
        prefix = (before << (8 if LEVEL < 4 else 7)) | best
    return prefix, left


@triton.jit(do_not_specialize=["rank", "capacity"])
def count_digits(
    head,
    candidates,
    rank,
    capacity,
    LEVEL: tl.constexpr,
    SHIFT: tl.constexpr,
    KEEPS: tl.constexpr,
    BATCH: tl.constexpr,
    HEAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """If all candidates are kept (KEEPS) there is nothing to count: without counts all bits of the
    least magnitude are zero."""
    head = row_of(head, HEAD, BATCH)
    candidates = row_of(candidates, capacity, BATCH)
    found = tl.minimum(tl.load(head + 1), capacity)
    start = tl.program_id(0).to(tl.int64) * CHUNK
    prefix, left = _state_after(head, rank, LEVEL)
    if tl.program_id(0) == 0:  # for the next level, which finds them in the place of this one
        tl.store(head + _STATES + 2 * (LEVEL + 1), prefix)
        tl.store(head + _STATES + 2 * (LEVEL + 1) + 1, left)
    if (start < found) & ((found > rank) | (not KEEPS)):
        at = start + tl.arange(0, CHUNK)
        is_item = at < found
        bits = magnitude(tl.load(candidates + at, mask=is_item, other=0))
        if LEVEL > 0:
            is_item = is_item & ((bits >> (SHIFT + (8 if LEVEL < 3 else 7))) == prefix)
        digit = (bits >> SHIFT) & (255 if LEVEL < 3 else 127)
        counts = tl.histogram(tl.where(is_item, digit, 0), 256)
        lane = tl.arange(0, 256)
        others = tl.sum((is_item == 0).to(tl.int32))
        counts = counts - tl.where(lane == 0, others, 0)
        tl.atomic_add(head + _DIGITS + 256 * LEVEL + lane, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["rank", "capacity"])
def count_kept(
    head,
    candidates,
    chunk_counts,
    rank,
    capacity,
    BATCH: tl.constexpr,
    HEAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many candidates of each chunk are above the least magnitude that is kept, or equal."""
    head = row_of(head, HEAD, BATCH)
    candidates = row_of(candidates, capacity, BATCH)
    found = tl.minimum(tl.load(head + 1), capacity)
    least, ties = _state_after(head, rank, 4)
    program = tl.program_id(0)
    if program == 0:
        tl.store(head + 2, least)
        tl.store(head + 3, ties)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    bits = magnitude(tl.load(candidates + at, mask=at < found, other=0))
    chunks = tl.num_programs(0)
    num_above = tl.sum(((at < found) & (bits > least)).to(tl.int32))
    num_equal = tl.sum(((at < found) & (bits == least)).to(tl.int32))
    chunk_counts = row_of(chunk_counts, 2 * chunks, BATCH) + program
    tl.store(chunk_counts, num_above)
    tl.store(chunk_counts + chunks, num_equal)


@triton.jit(do_not_specialize=["n", "rank", "capacity"])
def keep_many(
    moved,
    out,
    head,
    positions,
    candidates,
    chunk_counts,
    indices,
    values,
    n,
    rank,
    capacity,
    MASKS: tl.constexpr,
    HAS_OUT: tl.constexpr,
    CAPPED: tl.constexpr,
    BATCH: tl.constexpr,
    HEAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program for each chunk of candidates. Of too few or too many nothing is kept."""
    head = row_of(head, HEAD, BATCH)
    found = tl.load(head + 1)
    start = tl.program_id(0).to(tl.int64) * CHUNK
    size = rank
    if CAPPED:
        rank = tl.minimum(rank, found)
    if (start < found) & (found >= rank) & (found <= capacity):
        least, ties = tl.load(head + 2), tl.load(head + 3).to(tl.int64)
        chunks, program = tl.num_programs(0), tl.program_id(0)
        chunk_counts = row_of(chunk_counts, 2 * chunks, BATCH)
        before = sum_before(chunk_counts, program)
        equal_before = sum_before(chunk_counts + chunks, program)
        keep_chunk(
            row_of(moved, n, BATCH),
            row_of(out, n, BATCH),
            row_of(positions, capacity, BATCH),
            row_of(candidates, capacity, BATCH),
            row_of(indices, size, BATCH),
            row_of(values, size, BATCH),
            start,
            found,
            least,
            ties,
            before,
            equal_before,
            MASKS,
            HAS_OUT,
            CHUNK,
        )


@triton.jit
def keep_chunk(
    moved,
    out,
    positions,
    candidates,
    indices,
    values,
    start,
    found,
    least,
    ties,
    before,
    equal_before,
    MASKS: tl.constexpr,
    HAS_OUT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Keeps what is above the least and the first `ties` that are equal, after so many of both."""
    at = start + tl.arange(0, CHUNK)
    is_item = at < found
    p = tl.load(candidates + at, mask=is_item, other=0)
    bits = magnitude(p)
    is_above = is_item & (bits > least)
    is_equal = is_item & (bits == least)
    seen = tl.cumsum(is_above.to(tl.int32) | (is_equal.to(tl.int32) << 16), 0)
    equal_seen = equal_before + (seen >> 16)
    taken = is_above | (is_equal & (equal_seen <= ties))
    place = before + (seen & 0xFFFF) + tl.minimum(equal_seen, ties) - 1
    where = tl.load(positions + at, mask=taken, other=0)
    tl.store(indices + place, where, mask=taken)
    tl.store(values + place, p, mask=taken)
    if HAS_OUT:
        tl.store(out + where, tl.zeros_like(p), mask=taken)
    if MASKS:
        tl.store(moved + where, tl.zeros_like(p), mask=taken)


@triton.jit(do_not_specialize=["numel", "count", *KEY_WORDS])
def draw_sample(
    x,
    residual,
    velocity,
    head,
    samples,
    numel,
    count,
    k0,
    k1,
    s0,
    s1,
    s2,
    momentum,
    scale,
    KIND: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One element of each stratum as a candidate."""
    stratum, at, _size = strata_block(numel, count, k0, k1, s0, s1, s2, BLOCKS)
    drawn = stratum < count
    p = form_some(x, residual, velocity, at, drawn, momentum, scale, KIND, NESTEROV)
    tl.store(samples + stratum, p, mask=drawn)
    if tl.program_id(0) == 0:
        tl.store(head + 1, count)


@triton.jit(do_not_specialize=["count", "rank"])
def rank_few(
    samples, head, stats, count, rank, TILE: tl.constexpr, HEAD: tl.constexpr, STATS: tl.constexpr
):
    """The least magnitude of the `rank` largest, above zero, as threshold, and zeros behind it and
    in the statistics; one program."""
    lane = tl.arange(0, TILE)
    bits = magnitude(tl.load(samples + lane, mask=lane < count, other=0))
    least = tl.maximum(bits_of_rank(bits, lane < count, count, rank, 0, 0), 1)
    place = tl.arange(0, HEAD)
    tl.store(head + place, tl.where(place == 0, least, 0))
    tl.store(stats + tl.arange(0, STATS), tl.zeros([STATS], tl.int64))


@triton.jit(do_not_specialize=["rank"])
def rank_many(head, rank, HEAD: tl.constexpr):
    """The same after `count_digits`, whose counts it clears; one program."""
    least, _ties = _state_after(head, rank, 4)
    place = tl.arange(0, HEAD)
    tl.debug_barrier()
    tl.store(head + place, tl.where(place == 0, tl.maximum(least, 1), 0))
