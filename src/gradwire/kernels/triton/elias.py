"""Elias' codes in parallel by prefix sums: the bytes and integers of reference/elias.py.

The bits of one kind of all codewords lie one after another, so a place follows from sums over what
comes before: of the lengths in the encoder, and in the decoder of the ones of the unary part, which
are found as in `gaps.py`. Both directions are complete; nothing goes through the CPU. The host
reads once, whether lengths are those stated, or bytes valid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference import elias as reference
from gradwire.kernels.triton._candidates import ones_in, sum_before
from gradwire.kernels.triton._common import cdiv, launch
from gradwire.kernels.triton._gap_kernels import log2

_CHUNK = 2048  # integers of a program
_BYTES = 4096  # of a unary part, of a program
_MOST_BITS = 56
_NO_CENTRE = -1


def elias_lengths(values: Tensor) -> list[int]:
    counts, _ = _measure(values.contiguous(), None)
    found = counts.tolist()
    if found[-1]:  # out of range
        raise reference.not_positive_error(values)
    return found


def elias_encode(
    values: Tensor, lengths: list[int], delta: bool, centre: int | None = None
) -> Tensor:
    values, sizes = values.contiguous(), reference.elias_sizes(lengths, delta)
    counts, sums = _measure(values, centre)
    words = torch.zeros(cdiv(sum(sizes), 4), dtype=torch.int32, device=values.device)
    launch(
        _encode,
        (sums.shape[1],),
        values,
        sums,
        words,
        values.numel(),
        _NO_CENTRE if centre is None else centre,
        8 * sizes[0],
        8 * (sizes[0] + sizes[1]),
        32 * len(words),
        DELTA=delta,
        CHUNK=_CHUNK,
    )
    if counts.tolist() != lengths:
        raise reference.lengths_error()
    return words.view(torch.uint8)[: sum(sizes)]


def elias_decode(packed: Tensor, count: int, largest: int, delta: bool) -> tuple[Tensor, int]:
    found = _decode(packed, count, largest, delta, 0, 0) if count and len(packed) else None
    return reference.elias_decode(packed, count, largest, delta) if found is None else found


def elias_decode_symbols(
    packed: Tensor, count: int, alphabet: int, centre: int, delta: bool
) -> tuple[Tensor, int]:
    found = None
    if count and len(packed):
        found = _decode(packed, count, 2 * alphabet, delta, centre, alphabet)
    if found is None:
        return reference.elias_decode_symbols(packed, count, alphabet, centre, delta)
    return found[0].to(torch.int32), found[1]


def _measure(values: Tensor, centre: int | None) -> tuple[Tensor, Tensor]:
    """How many integers have each length, and of each chunk the sums of the lengths and of their
    own lengths: int64 [64] and [2, chunks]."""
    count, device = values.numel(), values.device
    chunks = cdiv(count, _CHUNK)
    counts = torch.zeros(64, dtype=torch.int64, device=device)
    sums = torch.empty(2, chunks, dtype=torch.int64, device=device)
    middle = _NO_CENTRE if centre is None else centre
    launch(_measure_chunk, (chunks,), values, counts, sums, count, middle, CHUNK=_CHUNK)
    return counts, sums


def _decode(
    packed: Tensor, count: int, largest: int, delta: bool, centre: int, alphabet: int
) -> tuple[Tensor, int] | None:
    """Integers, or symbols if there is an alphabet, and their bytes; None if they are invalid."""
    packed, device = packed.contiguous(), packed.device
    longest = largest.bit_length() - 1
    most = longest.bit_length() if delta else longest  # zeros in a row of the unary part
    ahead = min(len(packed), cdiv(count * (most + 1), 8))
    blocks, chunks = cdiv(ahead, _BYTES), cdiv(count, _CHUNK)
    ones = torch.empty(blocks, dtype=torch.int64, device=device)
    places = torch.empty(count, dtype=torch.int64, device=device)
    # Bytes of the unary part, ones in them, bytes so far, invalid lengths, invalid integers.
    status = torch.zeros(5, dtype=torch.int64, device=device)
    launch(_count_ones, (blocks,), packed, ones, ahead, BYTES=_BYTES)
    launch(_find_ones, (blocks,), packed, ones, places, status, ahead, count, BYTES=_BYTES)
    values, lengths = torch.empty_like(places), torch.empty_like(places)
    sums = torch.empty(chunks, dtype=torch.int64, device=device)
    size = len(packed)
    launch(_unary_lengths, (chunks,), places, lengths, sums, status, count, most, CHUNK=_CHUNK)
    for is_last in (False, True) if delta else (True,):
        target = values if is_last else places
        launch(
            _low_bits,
            (chunks,),
            packed,
            lengths,
            sums,
            target,
            status,
            count,
            size,
            largest if is_last else longest + 1,
            centre,
            alphabet if is_last else 0,
            CHUNK=_CHUNK,
        )
        launch(_end, (1,), packed, sums, status, chunks, size)
        if not is_last:
            launch(_next_lengths, (chunks,), target, lengths, sums, count, CHUNK=_CHUNK)
    unary, seen, used, *invalid = status.tolist()
    if not unary or seen != count or any(invalid) or used > size:
        return None
    return values, used


@triton.jit
def _integer(values, at, mask, centre):
    """Integers from 1 on, or what stands for symbols if there is a centre; 1 elsewhere."""
    value = tl.load(values + at, mask=mask, other=0).to(tl.int64)
    distance = value - centre
    zigzag = tl.where(distance < 0, -2 * distance, 2 * distance + 1)
    value = tl.where(centre < 0, value, zigzag)
    return tl.where(mask, value, 1)


@triton.jit(do_not_specialize=["count", "centre"])
def _measure_chunk(values, counts, sums, count, centre, CHUNK: tl.constexpr):
    program, chunks = tl.program_id(0), tl.num_programs(0)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < count
    value = _integer(values, at, mask, centre)
    is_valid = (value >= 1) & ((value >> 56) == 0)
    length = tl.where(is_valid, log2(tl.maximum(value, 1)), 63)
    found = tl.histogram(tl.where(mask, length, 62), 64)
    lane = tl.arange(0, 64)
    tl.atomic_add(counts + lane, found.to(tl.int64), mask=(found > 0) & (lane != 62))
    length = tl.where(mask, length, 0).to(tl.int64)
    tl.store(sums + program, tl.sum(length))
    tl.store(sums + chunks + program, tl.sum(tl.where(mask, log2(length + 1), 0).to(tl.int64)))


@triton.jit
def _put(words, bits, start, length, end, mask):
    """Writes the lowest `length` bits, at most 56, from bit `start` of words that were zero on."""
    word = start >> 5
    shift = start & 31
    bits = bits & ((tl.full(bits.shape, 1, tl.int64) << length) - 1)
    mask = mask & (start + length <= end) & (start >= 0)
    low = (bits << shift) & 0xFFFFFFFF
    middle = (bits >> (32 - shift)) & 0xFFFFFFFF
    high = (bits >> 32) >> (32 - shift)
    tl.atomic_or(words + word, low.to(tl.uint32).to(tl.int32, bitcast=True), mask=mask & (low != 0))
    middle_word = middle.to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + word + 1, middle_word, mask=mask & (middle != 0))
    high_word = high.to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + word + 2, high_word, mask=mask & (high != 0))


@triton.jit(do_not_specialize=["count", "centre", "second", "third", "end"])
def _encode(
    values,
    sums,
    words,
    count,
    centre,
    second,
    third,
    end,
    DELTA: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each stream from its bit on: 0, `second` (if DELTA) and `third`."""
    program, chunks = tl.program_id(0), tl.num_programs(0)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < count
    value = _integer(values, at, mask, centre)
    is_valid = (value >= 1) & ((value >> 56) == 0)
    length = tl.where(mask & is_valid, log2(tl.maximum(value, 1)), 0).to(tl.int64)
    low_end = sum_before(sums, program) + tl.cumsum(length, 0)
    _put(words, value, third + low_end - length, length, end, mask & (length > 0))
    zeros = length
    unary_end = low_end
    if DELTA:
        zeros = tl.where(mask, log2(length + 1), 0).to(tl.int64)
        unary_end = sum_before(sums + chunks, program) + tl.cumsum(zeros, 0)
        _put(words, length + 1, second + unary_end - zeros, zeros, end, mask & (zeros > 0))
    _put(words, tl.full(value.shape, 1, tl.int64), unary_end + at, zeros * 0 + 1, end, mask)


@triton.jit
def _bytes(packed, start, size, BYTES: tl.constexpr):
    at = start + tl.arange(0, BYTES)
    return tl.load(packed + at, mask=at < size, other=0).to(tl.uint32)


@triton.jit(do_not_specialize=["ahead"])
def _count_ones(packed, ones, ahead, BYTES: tl.constexpr):
    program = tl.program_id(0)
    byte = _bytes(packed, program.to(tl.int64) * BYTES, ahead, BYTES)
    tl.store(ones + program, tl.sum(ones_in(byte)).to(tl.int64))


@triton.jit(do_not_specialize=["ahead", "count"])
def _find_ones(packed, ones, places, status, ahead, count, BYTES: tl.constexpr):
    """The places of the first ones, and how long the part is that ends with the last of them."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * BYTES
    at = start + tl.arange(0, BYTES)
    byte = _bytes(packed, start, ahead, BYTES)
    found = ones_in(byte)
    place = sum_before(ones, program) + tl.cumsum(found, 0) - found
    is_last = (place < count) & (place + found >= count)
    tl.store(status + tl.zeros_like(at), at + 1, mask=is_last)
    tl.store(status + 1 + tl.zeros_like(at), place + found, mask=is_last)
    tl.store(status + 2 + tl.zeros_like(at), at + 1, mask=is_last)
    for bit in range(8):
        is_one = ((byte >> bit) & 1) > 0
        tl.store(places + place, 8 * at + bit, mask=is_one & (place < count))
        place += is_one.to(tl.int64)


@triton.jit(do_not_specialize=["count", "most"])
def _unary_lengths(places, lengths, sums, status, count, most, CHUNK: tl.constexpr):
    program = tl.program_id(0)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < tl.where(tl.load(status) > 0, count, 0)  # nothing if there are too few ones
    place = tl.load(places + at, mask=mask, other=0)
    before = tl.load(places + at - 1, mask=mask & (at > 0), other=-1)
    length = tl.where(mask, place - before - 1, 0)
    invalid = tl.sum((length > most).to(tl.int64))
    if invalid > 0:
        tl.atomic_add(status + 3, invalid)
    length = tl.minimum(length, most)
    tl.store(lengths + at, length, mask=at < count)
    tl.store(sums + program, tl.sum(length))


@triton.jit(do_not_specialize=["count"])
def _next_lengths(values, lengths, sums, count, CHUNK: tl.constexpr):
    """What the gamma code of lengths plus one says."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    length = tl.load(values + at, mask=at < count, other=1) - 1
    tl.store(lengths + at, length, mask=at < count)
    tl.store(sums + program, tl.sum(length))


@triton.jit(do_not_specialize=["count", "size", "largest", "centre", "alphabet"])
def _low_bits(
    packed,
    lengths,
    sums,
    values,
    status,
    count,
    size,
    largest,
    centre,
    alphabet,
    CHUNK: tl.constexpr,
):
    """Integers of these lengths, whose low bits begin behind the bytes used so far."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < count
    length = tl.load(lengths + at, mask=mask, other=0)
    start = sum_before(sums, program) + tl.cumsum(length, 0) - length
    byte = tl.load(status + 2) + (start >> 3)
    low = tl.zeros_like(start)
    for i in tl.static_range(8):
        in_packed = mask & (byte + i < size) & (length > 0)
        part = tl.load(packed + byte + i, mask=in_packed, other=0).to(tl.int64)
        low |= (part >> (start & 7)) if i == 0 else (part << (8 * i - (start & 7)))
    one = tl.full(length.shape, 1, tl.int64)
    value = (one << length) + (low & ((one << length) - 1))
    invalid = mask & (value > largest)
    if alphabet > 0:
        zigzag = value - 1
        symbol = centre + tl.where(zigzag % 2 == 1, -((zigzag + 1) // 2), zigzag // 2)
        invalid = invalid | (mask & ((symbol < 0) | (symbol >= alphabet)))
        value = symbol
    else:
        value = tl.where(mask, tl.minimum(value, largest), 1)
    wrong = tl.sum(invalid.to(tl.int64))
    if wrong > 0:
        tl.atomic_add(status + 4, wrong)
    tl.store(values + at, value, mask=mask)


@triton.jit(do_not_specialize=["chunks", "size"])
def _end(packed, sums, status, chunks, size):
    """Counts the bytes of the low bits, whose last one ends with zeros; one program."""
    bits = sum_before(sums, chunks)
    used = tl.load(status + 2) + (bits + 7) // 8
    rest = (bits % 8).to(tl.int32)
    if used <= size:
        if rest > 0:
            padding = tl.load(packed + used - 1).to(tl.int32) >> rest
            if padding > 0:
                tl.atomic_add(status + 4, tl.full([], 1, tl.int64))
    tl.debug_barrier()
    tl.store(status + 2, used)
