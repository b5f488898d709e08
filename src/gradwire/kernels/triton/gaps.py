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
from torch import Tensor

from gradwire.kernels._notes import note, noted
from gradwire.kernels.reference import gaps as reference
from gradwire.kernels.triton import _gap_kernels as kernels
from gradwire.kernels.triton._candidates import STATS
from gradwire.kernels.triton._common import cdiv, launch, signed

CHUNK = 2048  # indices of a program, of `launch_measure` and what reads its sums
# Bytes of the stream of quotients, of a program: few where that gives the device enough programs.
_FEW_BYTES, _MANY_BYTES = 1 << 9, 1 << 12
_LONG = 1 << 19  # bytes: a program adds up as many counts as there are blocks, 1024 at a time
_CLEARED, _MOST_CLEARING = 1 << 13, 1 << 11  # elements a program clears at least; programs for it
_STATUS = 5  # int64
# In the statistics of a row, int64: the number of candidates and how many of them are not finite
# (of a selection), the last index, gaps below zero, the sums of quotients, whether too many share
# a bin (`split`), the lengths.
LAST, NEGATIVE, SUMS, UNRANKED, LENGTHS = 2, 3, 4, 7, 8


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
        kernels.measure_chunk,
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
        kernels.encode,
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
    sums = _launch_decode(body, 0, parameter, count, universe, indices, None)
    if not _is_valid(sums[-_STATUS:].tolist(), parameter, universe, count):
        return reference.decode_rice(body, parameter, universe, count)
    return indices


def scatter_rice(
    packed: Tensor,
    front: int,
    values: Tensor,
    universe: int,
    out: Tensor,
    known: int | None = None,
) -> int | None:
    count = values.numel()
    sums = _launch_decode(packed, front, 0, count, universe, None, (values, out))
    if known is not None:
        return known
    numbers = sums[-_STATUS:].tolist()
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
    places: Tensor | None,
    scattered: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The indices, in `places`; or values written to their indices in a vector, zeros elsewhere,
    then the byte at `front` has the parameter plus one. Returns memory whose last numbers are what
    is known of the code when that has run."""
    reads = scattered is not None
    size = packed.numel() - front - reads
    block = _FEW_BYTES if size <= _LONG else _MANY_BYTES
    blocks, chunks = cdiv(size, block), cdiv(count, CHUNK)
    # Places if they are not returned, ones of each block, sums of the low parts of each chunk, and
    # the status: ones, wrong ends, the last one, the last index, the parameter or -1.
    num_sums = blocks + chunks + _STATUS + (count if reads else 0)
    sums = torch.empty(num_sums, dtype=torch.int64, device=packed.device)
    if places is None:
        places = sums
    values, out = (places, places) if scattered is None else scattered
    sizes = (count, parameter, front, size, blocks)
    of_bytes = {"READS": reads, "BYTES": block, "CHUNK": CHUNK, "num_warps": min(8, block // 128)}
    programs = blocks + chunks
    if reads:
        programs = max(programs, min(_MOST_CLEARING, cdiv(universe, _CLEARED)))
    launch(kernels.count_ones, (programs,), packed, sums, out, *sizes, universe, **of_bytes)
    launch(kernels.find_ones, (blocks,), packed, sums, places, *sizes, **of_bytes)
    launch(
        kernels.join,
        (chunks,),
        packed,
        sums,
        places,
        values,
        out,
        *sizes,
        universe,
        READS=reads,
        CHUNK=CHUNK,
        num_warps=8,
    )
    return sums


def _is_valid(status: list[int], parameter: int, universe: int, count: int) -> bool:
    ones, ends, last_one, last = status[:4]
    return (
        ones == count
        and not ends  # a last byte without ones, or padding that is not zero
        and last_one + 1 - count <= (universe - 1) >> parameter
        and last < universe
    )
