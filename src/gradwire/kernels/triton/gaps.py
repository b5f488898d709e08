"""Rice's code of the gaps of a sorted set, in parallel by prefix sums: the bytes and indices of
reference/gaps.py.

A program has a chunk of the set, and adds up what the chunks before it came to. The one of index i
is q_0 + .. + q_i + i bits into the stream of quotients, for q the gaps >> r, so each index finds
its place from such sums. A decoder finds the ones of the stream in the same way; then index i is

    ((its one - i) << r) + low_0 + .. + low_i + i

The host reads once: from `measure_gaps` what the lengths depend on, from `decode_rice` whether the
bytes are valid. What a selection measured already is not measured again (`_notes.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels._notes import note, noted
from gradwire.kernels.reference import gaps as reference
from gradwire.kernels.triton._candidates import STATS, ones_in, sum_before
from gradwire.kernels.triton._common import cdiv, launch

_CHUNK = 2048  # indices of a program
_BYTES = 4096  # of the stream of quotients, of a program
# In the statistics of a row, int64: the number of candidates and how many of them are not finite
# (of a selection), the last index, gaps below zero, the sums of quotients, the lengths.
LAST, NEGATIVE, SUMS, LENGTHS = 2, 3, 4, 8


class Measurement(NamedTuple):
    """What `measure_gaps` returns, and the quotients' sums of each chunk: int64, [3, chunks]."""

    middle: int
    sums: list[int]
    lengths: list[int]
    chunks: Tensor


def measure_gaps(indices: Tensor, universe: int) -> tuple[int, list[int], list[int]]:
    if not len(indices):
        return reference.measure_gaps(indices, universe)
    found = noted(indices, "gaps")
    if found is None or found[0] > universe:
        found = universe, _measure(indices.contiguous(), universe)
        note(indices, gaps=found)
    middle, sums, lengths, _ = found[1]
    return middle, sums, lengths


def _measure(indices: Tensor, universe: int) -> Measurement:
    stats = torch.zeros(STATS, dtype=torch.int64, device=indices.device)
    chunks = launch_measure(indices, stats)
    numbers = stats.tolist()
    if numbers[NEGATIVE] or numbers[LAST] >= universe:
        raise reference.not_increasing_error(indices, universe)
    return measurement(numbers, len(indices), chunks)


def launch_measure(
    indices: Tensor, stats: Tensor, rows: int = 1, is_counted: bool = False
) -> Tensor:
    """Adds to the statistics of every row, all of them flat; returns the chunks' sums, rows of
    [3, chunks].

    If `is_counted`, only as many indices of a row count as its statistics begin with.
    """
    count = len(indices) // rows
    chunks = cdiv(count, _CHUNK)
    sums = torch.empty(rows * 3 * chunks, dtype=torch.int64, device=indices.device)
    launch(
        _measure_chunk,
        (chunks, rows),
        indices,
        stats,
        sums,
        count,
        COUNTED=is_counted,
        STATS=STATS,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    return sums


def measurement(numbers: list[int], count: int, chunks: Tensor) -> Measurement:
    """The statistics of a row as the host read them."""
    mean = max((numbers[LAST] + 1 - count) // count, 1)
    middle = min(mean.bit_length() - 1, reference.LARGEST_PARAMETER)
    lengths = numbers[LENGTHS : LENGTHS + 64]
    return Measurement(middle, numbers[SUMS : SUMS + 3], lengths, chunks)


def encode_rice(indices: Tensor, parameter: int, quotients: int) -> Tensor:
    count = len(indices)
    if not count:
        return reference.encode_rice(indices, parameter, quotients)
    indices = indices if indices.is_contiguous() else indices.contiguous()
    found = noted(indices, "gaps")
    measured = _measure(indices, 1 << 62) if found is None else found[1]
    which = parameter - max(measured.middle - 1, 0)
    if not 0 <= which < 3:
        return reference.encode_rice(indices, parameter, quotients)
    if quotients != measured.sums[which]:
        raise reference.quotients_error(quotients)
    low_bytes = cdiv(count * parameter, 8)
    size = 1 + low_bytes + cdiv(count + quotients, 8)
    words = torch.zeros(cdiv(size, 4), dtype=torch.int32, device=indices.device)
    low_words = cdiv(8 + count * parameter, 32)
    chunks = len(measured.chunks) // 3
    launch(
        _encode,
        (chunks + cdiv(low_words, _CHUNK),),
        indices,
        measured.chunks.view(3, chunks)[which],
        words,
        count,
        parameter,
        8 + 8 * low_bytes,
        chunks,
        low_words,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    return words.view(torch.uint8)[:size]


def decode_rice(body: Tensor, parameter: int, universe: int, count: int) -> Tensor:
    low_bytes = cdiv(count * parameter, 8)
    stream_bytes = len(body) - low_bytes
    if not count or not stream_bytes:
        return reference.decode_rice(body, parameter, universe, count)
    body, device = body.contiguous(), body.device
    blocks, chunks = cdiv(stream_bytes, _BYTES), cdiv(count, _CHUNK)
    sums = torch.empty(blocks + chunks, dtype=torch.int64, device=device)
    indices = torch.empty(count, dtype=torch.int64, device=device)
    status = torch.empty(4, dtype=torch.int64, device=device)
    sizes = (count, parameter, low_bytes, stream_bytes, blocks)
    of_bytes, of_indices = {"BYTES": _BYTES, "num_warps": 8}, {"CHUNK": _CHUNK, "num_warps": 8}
    launch(_count_ones, (blocks + chunks,), body, sums, *sizes, **of_bytes, CHUNK=_CHUNK)
    launch(_find_ones, (blocks,), body, sums, indices, status, *sizes, **of_bytes)
    launch(_join, (chunks,), body, sums, indices, status, *sizes, **of_indices)
    ones, ends, last_one, last = status.tolist()
    if (
        ones != count
        or ends  # a last byte without ones, or padding that is not zero
        or last_one + 1 - count > (universe - 1) >> parameter
        or last >= universe
    ):
        return reference.decode_rice(body, parameter, universe, count)
    return indices


@triton.jit
def _gaps(indices, at, mask):
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


@triton.jit(do_not_specialize=["count"])
def _measure_chunk(
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
    gap = _gaps(indices, at, mask)
    last = tl.load(indices + count - 1, mask=count > 0, other=0)
    mean = tl.maximum((tl.maximum(last, 0) + 1 - count) // tl.maximum(count, 1), 1)
    middle = tl.minimum(log2(mean), 31)
    first = tl.maximum(middle - 1, 0).to(tl.int64)
    gap = tl.where(mask, gap, 0)
    for i in tl.static_range(3):
        total = tl.sum(gap >> (first + i))
        tl.store(sums + i * chunks + program, total)
        tl.atomic_add(stats + 4 + i, total)
    negative = tl.sum((gap < 0).to(tl.int64))
    if negative > 0:
        tl.atomic_add(stats + 3, negative)
    if program == 0:
        tl.store(stats + 2, last)
    # No gap plus one has 64 bits, so what is not an index counts there.
    lengths = tl.histogram(tl.where(mask, log2(tl.maximum(gap, 0) + 1), 63), 64)
    length = tl.arange(0, 64)
    tl.atomic_add(stats + 8 + length, lengths.to(tl.int64), mask=(lengths > 0) & (length < 63))


@triton.jit(do_not_specialize=["count", "parameter", "start", "chunks", "low_words"])
def _encode(indices, sums, words, count, parameter, start, chunks, low_words, CHUNK: tl.constexpr):
    """The first programs write ones from bit `start` on, the others the parameter and low parts."""
    program = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    if program < chunks:
        at = program.to(tl.int64) * CHUNK + lane
        mask = at < count
        gap = _gaps(indices, at, mask)
        quotient = tl.where(mask, gap >> parameter, 0)
        one = start + sum_before(sums, program) + tl.cumsum(quotient, 0) + at
        bit = tl.full([CHUNK], 1, tl.uint32) << (one & 31).to(tl.uint32)
        tl.atomic_or(words + (one >> 5), bit.to(tl.int32, bitcast=True), mask=mask)
    else:
        number = (program - chunks).to(tl.int64) * CHUNK + lane
        in_words = number < low_words
        # The first byte is no low part.
        begin = 32 * number - 8
        word = tl.where(number == 0, parameter + 1, 0).to(tl.int64)
        if parameter > 0:
            value = tl.maximum(begin, 0) // parameter
            for _ in range(32 // parameter + 2):
                shift = value * parameter - begin
                mask = in_words & (value < count) & (shift < 32)
                gap = _gaps(indices, value, mask)
                low = gap & ((tl.full([CHUNK], 1, tl.int64) << parameter) - 1)
                left = low << tl.where(mask & (shift > 0), shift, 0)
                part = tl.where(shift < 0, low >> tl.where(shift < 0, -shift, 0), left)
                word |= tl.where(mask, part, 0)
                value += 1
        word = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        tl.atomic_or(words + number, word, mask=in_words & (word != 0))


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


@triton.jit(do_not_specialize=["count", "parameter", "low_bytes", "stream_bytes", "blocks"])
def _count_ones(
    body,
    sums,
    count,
    parameter,
    low_bytes,
    stream_bytes,
    blocks,
    CHUNK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Ones of each block of the stream, and the sum of each chunk's low parts."""
    program = tl.program_id(0)
    if program < blocks:
        total = tl.sum(ones_in(_stream(body, program, low_bytes, stream_bytes, BYTES)))
        total = total.to(tl.int64)
    else:
        at = (program - blocks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        total = tl.sum(_low_parts(body, at, at < count, parameter, low_bytes))
    tl.store(sums + program, total)


@triton.jit(do_not_specialize=["count", "parameter", "low_bytes", "stream_bytes", "blocks"])
def _find_ones(
    body,
    sums,
    places,
    status,
    count,
    parameter,
    low_bytes,
    stream_bytes,
    blocks,
    BYTES: tl.constexpr,
):
    """The place of each one in the stream."""
    program = tl.program_id(0)
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
        ends = tl.load(body + low_bytes + stream_bytes - 1) == 0
        used = (count.to(tl.int64) * parameter % 8).to(tl.int32)
        if used > 0:
            ends = ends | ((tl.load(body + low_bytes - 1).to(tl.int32) >> used) != 0)
        tl.store(status + 1, ends.to(tl.int64))


@triton.jit(do_not_specialize=["count", "parameter", "low_bytes", "stream_bytes", "blocks"])
def _join(
    body,
    sums,
    indices,
    status,
    count,
    parameter,
    low_bytes,
    stream_bytes,
    blocks,
    CHUNK: tl.constexpr,
):
    """Indices in the place of the ones."""
    program = tl.program_id(0)
    at = program.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = at < count
    low = _low_parts(body, at, mask, parameter, low_bytes)
    one = tl.load(indices + at, mask=mask, other=0)
    low_before = sum_before(sums + blocks, program)
    index = ((one - at) << parameter) + low_before + tl.cumsum(low, 0) + at
    tl.store(indices + at, index, mask=mask)
    tl.store(status + 2 + tl.zeros_like(at), one, mask=at == count - 1)
    tl.store(status + 3 + tl.zeros_like(at), index, mask=at == count - 1)
