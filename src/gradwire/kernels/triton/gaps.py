"""Rice's code of the gaps of a sorted set, in parallel by prefix sums: the bytes and indices of
reference/gaps.py.

A program has a chunk of the set, and adds up what the chunks before it came to. The one of index i
is q_0 + .. + q_i + i bits into the stream of quotients, for q the gaps >> r, so each index finds
its place from such sums. A decoder finds the ones of the stream in the same way; then index i is

    ((its one - i) << r) + low_0 + .. + low_i + i

The host reads once: from `measure_gaps` what the lengths depend on, from `decode_rice` whether the
bytes are valid; `scatter_rice` leaves even the parameter to the device until then. What a selection
measured already is not measured again (`_notes.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels._notes import note, noted
from gradwire.kernels.reference import gaps as reference
from gradwire.kernels.triton._candidates import STATS, ones_in, sum_before
from gradwire.kernels.triton._common import cdiv, launch, signed

CHUNK = 2048  # indices of a program, of `launch_measure` and what reads its sums
# Bytes of the stream of quotients, of a program: few where that gives the device enough programs.
_FEW_BYTES, _MANY_BYTES = 1 << 9, 1 << 12
_LONG = 1 << 19  # bytes: a program adds up as many counts as there are blocks, 1024 at a time
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
    if not indices.numel():
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
    count = indices.numel() // rows
    sums, chunks = make_sums(indices, count, rows)
    launch(
        _measure_chunk,
        (chunks, rows),
        indices,
        stats,
        sums,
        count,
        COUNTED=is_counted,
        STATS=STATS,
        CHUNK=CHUNK,
        num_warps=8,
    )
    return sums


def make_sums(indices: Tensor, count: int, rows: int) -> tuple[Tensor, int]:
    """Memory for the sums of the chunks of `count` indices of each row, and how many they are."""
    chunks = cdiv(count, CHUNK)
    return torch.empty(rows * 3 * chunks, dtype=torch.int64, device=indices.device), chunks


def measurement(numbers: list[int], count: int, chunks: Tensor) -> Measurement:
    """The statistics of a row as the host read them."""
    mean = max((numbers[LAST] + 1 - count) // count, 1)
    middle = min(mean.bit_length() - 1, reference.LARGEST_PARAMETER)
    lengths = numbers[LENGTHS : LENGTHS + 64]
    return Measurement(middle, numbers[SUMS : SUMS + 3], lengths, chunks)


def encode_rice(indices: Tensor, parameter: int, quotients: int) -> Tensor:
    count = indices.numel()
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
    size = 1 + cdiv(count * parameter, 8) + cdiv(count + quotients, 8)
    words = torch.zeros(cdiv(size, 4), dtype=torch.int32, device=indices.device)
    _launch_encode(words, 0, indices, measured, parameter, bytes([parameter + 1]), None, 0)
    return words.view(torch.uint8)[:size]


def write_entries(
    words: Tensor,
    code_at: int,
    indices: Tensor,
    parameter: int,
    lead: bytes,
    values: Tensor,
    values_at: int,
) -> bool:
    measured = noted(indices, "gaps")[1]
    if not 0 <= parameter - max(measured.middle - 1, 0) < 3:
        return False
    _launch_encode(words, code_at, indices, measured, parameter, lead, values, values_at)
    return True


def _launch_encode(
    words: Tensor,
    code_at: int,
    indices: Tensor,
    measured: Measurement,
    parameter: int,
    lead: bytes,
    values: Tensor | None,
    values_at: int,
) -> None:
    """Writes into zeros: the code behind the bytes of `lead`, at most 8, and the values."""
    front, chunks = int.from_bytes(lead, "little"), measured.chunks.numel() // 3
    launch(
        _encode,
        (chunks,),
        indices,
        words if values is None else values,
        measured.chunks,
        words,
        indices.numel(),
        parameter,
        (parameter - max(measured.middle - 1, 0)) * chunks,
        code_at,
        values_at,
        signed(front),
        signed(front >> 32),
        8 * len(lead),
        HAS_VALUES=values is not None,
        CHUNK=CHUNK,
        num_warps=8,
    )


def decode_rice(body: Tensor, parameter: int, universe: int, count: int) -> Tensor:
    low_bytes = cdiv(count * parameter, 8)
    if not count or len(body) == low_bytes:
        return reference.decode_rice(body, parameter, universe, count)
    body = body.contiguous()
    indices = torch.empty(count, dtype=torch.int64, device=body.device)
    status = _launch_decode(body, 0, parameter, count, universe, indices, None)
    if not _is_valid(status.tolist(), parameter, universe, count):
        return reference.decode_rice(body, parameter, universe, count)
    return indices


def scatter_rice(
    packed: Tensor, front: int, values: Tensor, universe: int, out: Tensor
) -> int | None:
    count = values.numel()
    places = torch.empty(count, dtype=torch.int64, device=packed.device)
    numbers = _launch_decode(packed, front, 0, count, universe, places, (values, out)).tolist()
    parameter: int = numbers[4]
    if parameter < 0 or not _is_valid(numbers, parameter, universe, count):
        return None
    return parameter


def _launch_decode(
    packed: Tensor,
    front: int,
    parameter: int,
    count: int,
    universe: int,
    places: Tensor,
    scattered: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The indices, in `places`; or values written to their indices in a vector, then the byte at
    `front` has the parameter plus one. Returns what is known of the code when that has run."""
    reads, device = scattered is not None, packed.device
    size = packed.numel() - front - reads
    block = _FEW_BYTES if size <= _LONG else _MANY_BYTES
    blocks, chunks = cdiv(size, block), cdiv(count, CHUNK)
    # Ones of each block, sums of the low parts of each chunk.
    sums = torch.empty(blocks + chunks, dtype=torch.int64, device=device)
    # Ones, wrong ends, the last one, the last index, the parameter: -1 if it cannot be one.
    status = torch.empty(5, dtype=torch.int64, device=device)
    values, out = (places, places) if scattered is None else scattered
    sizes = (count, parameter, front, size, blocks)
    of_bytes = {"READS": reads, "BYTES": block, "num_warps": min(8, block // 128)}
    of_indices = {"READS": reads, "CHUNK": CHUNK, "num_warps": 8}
    launch(_count_ones, (blocks + chunks,), packed, sums, *sizes, **of_bytes, CHUNK=CHUNK)
    launch(_find_ones, (blocks,), packed, sums, places, status, *sizes, **of_bytes)
    launch(
        _join, (chunks,), packed, sums, places, status, values, out, *sizes, universe, **of_indices
    )
    return status


def _is_valid(status: list[int], parameter: int, universe: int, count: int) -> bool:
    ones, ends, last_one, last = status[:4]
    return (
        ones == count
        and not ends  # a last byte without ones, or padding that is not zero
        and last_one + 1 - count <= (universe - 1) >> parameter
        and last < universe
    )


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
    gap = gaps_before(indices, at, mask)
    last = tl.load(indices + count - 1, mask=count > 0, other=0)
    first = first_parameter(last, count)
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
    lengths = count_lengths(gap, mask)
    length = tl.arange(0, 64)
    tl.atomic_add(stats + 8 + length, lengths, mask=(lengths > 0) & (length < 63))


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
def _encode(
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
        tl.atomic_or(code + lane, lead, mask=lead != 0)
    if parameter > 0:
        bit = at * parameter + lead_bits
        low = (gap & ((tl.full([CHUNK], 1, tl.int64) << parameter) - 1)) << (bit & 31)
        for half in tl.static_range(2):
            word = ((low >> (32 * half)) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
            tl.atomic_or(code + (bit >> 5) + half, word, mask=mask & (word != 0))
    quotient = tl.where(mask, gap >> parameter, 0)
    start = (count.to(tl.int64) * parameter + 7) // 8 * 8 + lead_bits
    one = start + sum_before(sums + first_sum, program) + tl.cumsum(quotient, 0) + at
    bit = tl.full([CHUNK], 1, tl.uint32) << (one & 31).to(tl.uint32)
    tl.atomic_or(code + (one >> 5), bit.to(tl.int32, bitcast=True), mask=mask)
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


@triton.jit(do_not_specialize=["count", "parameter", "front", "size", "blocks"])
def _count_ones(
    packed,
    sums,
    count,
    parameter,
    front,
    size,
    blocks,
    READS: tl.constexpr,
    CHUNK: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Ones of each block of the stream, and the sum of each chunk's low parts."""
    program = tl.program_id(0)
    body, _found, parameter, low_bytes, stream_bytes = _sections(
        packed, front, size, parameter, count, READS
    )
    if program < blocks:
        total = tl.sum(ones_in(_stream(body, program, low_bytes, stream_bytes, BYTES)))
        total = total.to(tl.int64)
    else:
        at = (program - blocks).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        total = tl.sum(_low_parts(body, at, at < count, parameter, low_bytes))
    tl.store(sums + program, total)


@triton.jit(do_not_specialize=["count", "parameter", "front", "size", "blocks"])
def _find_ones(
    packed,
    sums,
    places,
    status,
    count,
    parameter,
    front,
    size,
    blocks,
    READS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """The place of each one in the stream."""
    program = tl.program_id(0)
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
def _join(
    packed,
    sums,
    places,
    status,
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
