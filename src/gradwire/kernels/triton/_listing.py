"""The largest of many candidates of one vector in two launches, where `_ranking.py` takes six.

The candidates have been counted in bins already, as they were collected. Where few share the bin of
the least that is kept, they are listed (`split`), and each block of candidates is written by a
program that finds in the list what is before it (`keep_listed`).
"""

import triton
import triton.language as tl

from gradwire.kernels.triton._candidates import BINS, bin_of, bits_of_rank, magnitude, sum_before
from gradwire.kernels.triton._ranking import keep_chunk

_BINS = tl.constexpr(BINS)


@triton.jit(do_not_specialize=["rank", "capacity", "bin_shift"])
def split(
    head,
    stats,
    candidates,
    chunk_counts,
    listed,
    rank,
    capacity,
    bin_shift,
    CAPPED: tl.constexpr,
    LISTED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program for each chunk of candidates, whose bins are counted. Counts those above the bin of
    the least that is kept, and lists magnitudes and numbers of those in it, in any order. Behind
    `found` in the head are that bin, -1 if all are kept, how many of its items are, how many it
    has, and how many are listed; of more than LISTED none, which is noted in the statistics."""
    found = tl.load(head + 1)
    if CAPPED:
        rank = tl.minimum(rank, found)
    program = tl.program_id(0)
    start = program.to(tl.int64) * CHUNK
    if (start < found) & (found >= rank) & (found <= capacity):
        bin = tl.arange(0, _BINS)
        counts = tl.load(head + _BINS + bin)
        reach = found - tl.cumsum(counts, 0) + counts  # this bin or a larger one
        best = tl.max(tl.where(reach >= rank, bin, 0))
        inside = tl.sum(tl.where(bin == best, counts, 0))
        left = rank - tl.sum(tl.where(bin > best, counts, 0))
        is_all = found == rank
        best = tl.where(is_all, -1, best)
        inside = tl.where(is_all, 0, inside)
        left = tl.where(is_all, 0, left)
        if program == 0:
            tl.store(head + 2, best)
            tl.store(head + 3, left)
            tl.store(head + 4, inside)
            tl.store(stats + 7, (inside > LISTED).to(tl.int64))  # UNRANKED
        if inside <= LISTED:
            at = start + tl.arange(0, CHUNK)
            bits = magnitude(tl.load(candidates + at, mask=at < found, other=0))
            own = bin_of(bits, tl.load(head), bin_shift)
            tl.store(chunk_counts + program, tl.sum(((at < found) & (own > best)).to(tl.int32)))
            is_inside = ((at < found) & (own == best)).to(tl.int32)
            count = tl.sum(is_inside)
            if count > 0:
                place = tl.atomic_add(head + 5, count, sem="relaxed")
                place += tl.cumsum(is_inside, 0) - 1
                tl.store(listed + place, bits, mask=is_inside > 0)
                tl.store(listed + LISTED + place, at.to(tl.int32), mask=is_inside > 0)


@triton.jit(do_not_specialize=["n", "rank", "capacity", "bin_shift"])
def keep_listed(
    moved,
    out,
    head,
    positions,
    candidates,
    chunk_counts,
    listed,
    indices,
    values,
    rank,
    capacity,
    bin_shift,
    MASKS: tl.constexpr,
    HAS_OUT: tl.constexpr,
    CAPPED: tl.constexpr,
    LISTED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """As `keep_many`, after `split`: each program finds in its list the least that is kept."""
    found, best, left = tl.load(head + 1), tl.load(head + 2), tl.load(head + 3)
    inside = tl.load(head + 4)
    program = tl.program_id(0)
    start = program.to(tl.int64) * CHUNK
    if CAPPED:
        rank = tl.minimum(rank, found)
    is_fit = (found >= rank) & (found <= capacity) & (inside <= LISTED)
    if (start < found) & is_fit:
        lane = tl.arange(0, LISTED)
        listed_bits = tl.load(listed + lane, mask=lane < inside, other=0)
        number = tl.load(listed + LISTED + lane, mask=lane < inside, other=0)
        base = tl.load(head) + (tl.maximum(best, 0) << bin_shift)
        least = bits_of_rank(listed_bits, lane < inside, inside, left, base, 0)
        least = tl.where(best < 0, -1, least)
        # In one sum: above the least, above in chunks before this, equal in those.
        is_above = ((lane < inside) & (listed_bits > least)).to(tl.int64)
        is_equal = ((lane < inside) & (listed_bits == least)).to(tl.int64)
        is_before = is_above | (is_equal << 16)
        seen = tl.sum((is_above << 32) | tl.where(number < start, is_before, 0))
        before = sum_before(chunk_counts, program) + (seen & 0xFFFF)
        equal_before = (seen >> 16) & 0xFFFF
        ties = left - (seen >> 32)
        keep_chunk(
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
            MASKS,
            HAS_OUT,
            CHUNK,
        )
