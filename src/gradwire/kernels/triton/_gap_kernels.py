"""The kernels of `gaps.py`: what gaps come to, Rice's code of them, and the way back."""

import triton
import triton.language as tl

from gradwire.kernels.triton._candidates import ones_in, sum_before
from gradwire.kernels.triton._common import store_block


@triton.jit
def gaps_before(indices, at, mask):
    """The gaps before indices at some places."""
    index = tl.load(indices + at, mask=mask, other=0)
    before = tl.load(indices + at - 1, mask=mask & (at > 0), other=-1)
    return index - before - 1


@triton.jit
def log2(values):
    """floor(log2 v) of positive int64, int32."""
    length = (values * 0).to(tl.int32)
    for i in tl.static_range(6):
        is_long = (values >> (32 >> i)) > 0
        length += tl.where(is_long, 32 >> i, 0)
        values = tl.where(is_long, values >> (32 >> i), values)
    return length


@triton.jit
def first_parameter(last, count):
    """The least parameter that is measured, int64."""
    mean = tl.maximum((tl.maximum(last, 0) + 1 - count) // tl.maximum(count, 1), 1)
    middle = tl.minimum(log2(mean), 31)
    return tl.maximum(middle - 1, 0).to(tl.int64)


@triton.jit
def count_lengths(gap, mask):
    """How many gaps plus one have 1, 2, .. bits, and in place 63 how many there are not: no gap
    plus one has 64 bits, so what is not an index counts there."""
    return tl.histogram(tl.where(mask, log2(tl.maximum(gap, 0) + 1), 63), 64).to(tl.int64)


@triton.jit(do_not_specialize=["count"])
def measure_chunk(
    indices, stats, sums, count, COUNTED: tl.constexpr, STATS: tl.constexpr, CHUNK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    program, chunks = tl.program_id(0), tl.num_programs(0)
    indices += row * count
    stats += row * STATS
    sums += (row * 3) * chunks
    if COUNTED:
        count = tl.minimum(tl.load(stats), count)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < count
    gap = gaps_before(indices, at, mask)
    last = tl.load(indices + count - 1, mask=count > 0, other=0)
    first = first_parameter(last, count)
    gap = tl.where(mask, gap, 0)
    for i in tl.static_range(3):
        total = tl.sum(gap >> (first + i))
        tl.store(sums + i * chunks + program, total)
        tl.atomic_add(stats + 4 + i, total, sem="relaxed")
    negative = tl.sum((gap < 0).to(tl.int64))
    if negative > 0:
        tl.atomic_add(stats + 3, negative, sem="relaxed")
    if program == 0:
        tl.store(stats + 2, last)
    lengths = count_lengths(gap, mask)
    length = tl.arange(0, 64)
    tl.atomic_add(stats + 8 + length, lengths, mask=(lengths > 0) & (length < 63), sem="relaxed")


@triton.jit(
    do_not_specialize=[
        "count",
        "parameter",
        "first_sum",
        "code_at",
        "values_at",
        "lead_low",
        "lead_high",
        "lead_bits",
    ]
)
def encode(
    indices,
    values,
    sums,
    words,
    count,
    parameter,
    first_sum,
    code_at,
    values_at,
    lead_low,
    lead_high,
    lead_bits,
    HAS_VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program for each chunk. The words are zero before."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < count
    gap = gaps_before(indices, at, mask)
    code = words + code_at
    if program == 0:
        lane = tl.arange(0, 2)
        lead = tl.where(lane == 0, lead_low, lead_high)
        tl.atomic_or(code + lane, lead, mask=lead != 0, sem="relaxed")
    if parameter > 0:
        bit = at * parameter + lead_bits
        low = (gap & ((tl.full([CHUNK], 1, tl.int64) << parameter) - 1)) << (bit & 31)
        for half in tl.static_range(2):
            word = ((low >> (32 * half)) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
            tl.atomic_or(code + (bit >> 5) + half, word, mask=mask & (word != 0), sem="relaxed")
    quotient = tl.where(mask, gap >> parameter, 0)
    start = (count.to(tl.int64) * parameter + 7) // 8 * 8 + lead_bits
    one = start + sum_before(sums + first_sum, program) + tl.cumsum(quotient, 0) + at
    bit = tl.full([CHUNK], 1, tl.uint32) << (one & 31).to(tl.uint32)
    tl.atomic_or(code + (one >> 5), bit.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")
    if HAS_VALUES:
        value = tl.load(values + at, mask=mask, other=0)
        tl.store(words + values_at + at, value.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def _sections(packed, front, size, parameter, count, READS: tl.constexpr):
    """Where the low parts begin, the parameter, -1 if there is none, a parameter to go on with, and
    the bytes of low parts and of the stream behind them."""
    body = packed + front
    found = parameter.to(tl.int64)
    if READS:
        found = tl.load(body).to(tl.int64) - 1
        body += 1
        low_bytes = (count.to(tl.int64) * found + 7) // 8
        found = tl.where((found > 31) | (low_bytes >= size), -1, found)
    used = tl.maximum(found, 0)
    low_bytes = (count.to(tl.int64) * used + 7) // 8
    return body, found, used, low_bytes, size - low_bytes


@triton.jit
def _low_parts(body, at, mask, parameter, low_bytes):
    begin = at * parameter
    byte = begin >> 3
    low = tl.zeros_like(begin)
    for i in tl.static_range(5):
        in_low = mask & (byte + i < low_bytes)
        part = tl.load(body + byte + i, mask=in_low, other=0).to(tl.int64)
        low |= part << (8 * i)
    one = tl.full([], 1, tl.int64)
    return tl.where(mask, (low >> (begin & 7)) & ((one << parameter) - 1), 0)


@triton.jit
def _stream(body, block, low_bytes, stream_bytes, BYTES: tl.constexpr):
    at = block.to(tl.int64) * BYTES + tl.arange(0, BYTES)
    return tl.load(body + low_bytes + at, mask=at < stream_bytes, other=0).to(tl.uint32)


@triton.jit
def _clear(out, universe):
    """Zeros, of which each program of the grid writes its share."""
    share = ((universe.to(tl.int64) // tl.num_programs(0)) // 2048 + 1) * 2048
    start = tl.program_id(0) * share
    zeros = tl.zeros([2048], out.dtype.element_ty)
    for first in range(start, tl.minimum(start + share, universe), 2048):
        at = first + tl.arange(0, 2048)
        store_block(out, at, zeros, universe, first + 2048 <= universe)


@triton.jit(do_not_specialize=["count", "parameter", "front", "size", "blocks", "universe"])
def count_ones(
    packed,
    sums,
    out,
    count,
    parameter,
    front,
    size,
    blocks,
    universe,
    READS: tl.constexpr,
    CHUNK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Ones of each block of the stream, and the sum of each chunk's low parts; if READS all
    programs, of which there may be more, clear what values are written to."""
    program = tl.program_id(0)
    if READS:
        _clear(out, universe)
        sums += count  # behind the places
    body, _found, parameter, low_bytes, stream_bytes = _sections(
        packed, front, size, parameter, count, READS
    )
    if program < blocks:
        total = tl.sum(ones_in(_stream(body, program, low_bytes, stream_bytes, BYTES)))
        tl.store(sums + program, total.to(tl.int64))
    else:
        at = (program - blocks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        if (program - blocks).to(tl.int64) * CHUNK < count:
            total = tl.sum(_low_parts(body, at, at < count, parameter, low_bytes))
            tl.store(sums + program, total)


@triton.jit(do_not_specialize=["count", "parameter", "front", "size", "blocks"])
def find_ones(
    packed,
    sums,
    places,
    count,
    parameter,
    front,
    size,
    blocks,
    READS: tl.constexpr,
    CHUNK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """The place of each one in the stream."""
    program = tl.program_id(0)
    if READS:
        sums += count
    status = sums + blocks + (count + CHUNK - 1) // CHUNK
    body, found, parameter, low_bytes, stream_bytes = _sections(
        packed, front, size, parameter, count, READS
    )
    at = program.to(tl.int64) * BYTES + tl.arange(0, BYTES)
    byte = _stream(body, program, low_bytes, stream_bytes, BYTES)
    ones = ones_in(byte)
    before = sum_before(sums, program)
    place = before + tl.cumsum(ones, 0) - ones
    for bit in range(8):
        is_one = ((byte >> bit) & 1) > 0
        tl.store(places + place, 8 * at + bit, mask=is_one & (place < count))
        place += is_one.to(tl.int64)
    if program == blocks - 1:
        tl.store(status, before + tl.sum(ones))
        ends = tl.load(body + size - 1) == 0
        used = (count.to(tl.int64) * parameter % 8).to(tl.int32)
        if used > 0:
            ends = ends | ((tl.load(body + low_bytes - 1).to(tl.int32) >> used) != 0)
        tl.store(status + 1, ends.to(tl.int64))
        tl.store(status + 4, found)


@triton.jit(do_not_specialize=["count", "parameter", "front", "size", "blocks", "universe"])
def join(
    packed,
    sums,
    places,
    values,
    out,
    count,
    parameter,
    front,
    size,
    blocks,
    universe,
    READS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Indices in the place of the ones; or if READS values to where they point, within `out`."""
    program = tl.program_id(0)
    if READS:
        sums += count
    status = sums + blocks + tl.num_programs(0)
    body, _found, parameter, low_bytes, _stream_bytes = _sections(
        packed, front, size, parameter, count, READS
    )
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < count
    low = _low_parts(body, at, mask, parameter, low_bytes)
    one = tl.load(places + at, mask=mask, other=0)
    low_before = sum_before(sums + blocks, program)
    index = ((one - at) << parameter) + low_before + tl.cumsum(low, 0) + at
    if READS:
        is_inside = mask & (index >= 0) & (index < universe)
        tl.store(out + index, tl.load(values + at, mask=mask, other=0), mask=is_inside)
    else:
        tl.store(places + at, index, mask=mask)
    tl.store(status + 2 + tl.zeros_like(at), one, mask=at == count - 1)
    tl.store(status + 3 + tl.zeros_like(at), index, mask=at == count - 1)
