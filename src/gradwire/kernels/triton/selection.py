"""Elements of large magnitude: a threshold from a sample, one pass that marks what reaches it, and
an exact selection among those (`_stages.py`).

The host waits once, for whether the sample misled (then all elements become candidates) and for
what the code of the positions needs to know; that is noted on the positions (`_notes.py`).
"""

import math
import struct
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.kernels._motion import Residual
from gradwire.kernels._notes import note
from gradwire.kernels.triton import _stages as stages
from gradwire.kernels.triton._candidates import HEAD, STATS
from gradwire.kernels.triton._common import key_words
from gradwire.kernels.triton._stages import Chosen, Vectors
from gradwire.kernels.triton.gaps import launch_measure, measurement

_SPARE = 1024  # more candidates than are likely, where they are few


def select_largest(x: Tensor, residual: Residual | None, count: int, out: Tensor | None) -> Chosen:
    (chosen,) = _select_largest(stages.vectors_of(x, residual, out), count)
    return chosen


def select_largest_rows(
    x: Tensor, residual: Residual | None, count: int, out: Tensor | None
) -> list[Chosen]:
    """`select_largest` of every row, in the time of one."""
    return _select_largest(stages.vectors_of(x, residual, out, len(x)), count)


def select_sampled(
    x: Tensor,
    residual: Residual | None,
    size: int,
    rank: int,
    seed: int,
    stream: tuple[int, int, int],
    most: int,
    out: Tensor | None,
) -> Chosen:
    n = x.numel()
    vectors = stages.vectors_of(x, residual, out)
    head, stats = stages.sample_strata(vectors, size, rank, key_words(seed, stream))
    marks = stages.mark(vectors, head, 0)
    room = math.ceil((rank + 6 * math.sqrt(rank) + 8) / size * n) + _SPARE
    while True:
        room = min(n, room)
        count = min(most, room)
        kept = stages.make_chosen(vectors, count)
        shift = stages.bin_shift(vectors, room, count)
        found = stages.collect(vectors, head, stats, marks, room, shift)
        given = vectors, head, stats, found, room, kept, count
        chunks = stages.keep(*given, shift, is_capped=True)
        numbers, chunks = stages.read(*given, chunks, is_capped=True)
        if numbers[0] <= room:
            return _noted(kept, min(numbers[0], most), n, numbers, chunks)
        room = numbers[0]
        head[2:] = 0  # what was counted
        stats.zero_()


def select_above(
    x: Tensor, residual: Residual | None, threshold: float, capacity: int, out: Tensor | None
) -> Chosen:
    vectors = stages.vectors_of(x, residual, out)
    (bits,) = struct.unpack("<i", struct.pack("<f", threshold))
    return _collect_all(vectors, stages.mark(vectors, None, min(bits, 0x7F800000)), capacity)


def collect_marked(x: Tensor, residual: Residual | None, marks: Tensor, capacity: int) -> Chosen:
    """Positions and values of the elements with a one in a bitmap, given with the counts of each
    tile: a second time if they are more than `capacity`."""
    return _collect_all(stages.vectors_of(x, residual, None), marks, capacity)


def _select_largest(vectors: Vectors, count: int) -> list[Chosen]:
    if not count:
        stages.mark(vectors, None, stages.NOTHING)
        return [stages.make_chosen(vectors, 0) for _ in range(vectors.rows)]
    n = vectors.n
    chosen = _select(vectors, count, *_guess(n, count, stages.FEW))
    if chosen is None:  # the sample misled: all elements are candidates
        chosen = _select(vectors, count, 0, n)
    assert chosen is not None
    return chosen


def _select(vectors: Vectors, count: int, rank: int, room: int) -> list[Chosen] | None:
    """The `count` largest of every row, among what reaches the `rank` in its sample; None if that
    are not enough, or more than there is room for."""
    rows, n = vectors.rows, vectors.n
    if n <= stages.FEW:
        kept, stats = stages.make_chosen(vectors, count), stages.make_stats(vectors, is_clear=False)
        chunks = stages.keep_few(vectors, stats, stats, kept, n, kept, count, is_direct=True)
    else:
        head, stats = stages.sample(vectors, rank)
        marks = stages.mark(vectors, head, 0)
        shift = stages.bin_shift(vectors, room, count) if rank else 0
        found = stages.collect(vectors, head, stats, marks, room, shift)
        kept = stages.make_chosen(vectors, count)
        given = vectors, head, stats, found, room, kept, count
        chunks = stages.keep(*given, shift)
        if rows == 1:
            numbers, chunks = stages.read(*given, chunks)
            is_enough = count <= numbers[0] <= room
            return [_noted(kept, count, n, numbers, chunks)] if is_enough else None
    numbers = stats.tolist()
    if rows == 1:
        return [_noted(kept, count, n, numbers, chunks)]
    of_rows = [numbers[start : start + STATS] for start in range(0, rows * STATS, STATS)]
    if not all(count <= row[0] <= room for row in of_rows):
        return None
    by_row = (part.view(rows, -1).unbind() for part in (*kept, chunks))
    return [
        _noted((indices, values), count, n, own, of_chunks)
        for indices, values, of_chunks, own in zip(*by_row, of_rows)
    ]


@lru_cache(maxsize=1024)
def _guess(n: int, count: int, few: int) -> tuple[int, int]:
    """A rank in a sample that is likely to be below the `count` largest, 0 if all elements are
    to be candidates, and room for the candidates."""
    samples = stages.sample_size(n)
    if n <= few or n < samples:
        return 0, n
    expected = samples * count / n
    rank = math.ceil(1.05 * expected + 5 * math.sqrt(expected) + 8)
    if rank >= samples:
        return 0, n
    return rank, min(n, math.ceil((rank + 6 * math.sqrt(rank)) / samples * n) + _SPARE)


def _collect_all(vectors: Vectors, marks: Tensor, capacity: int) -> Chosen:
    while True:
        head = torch.empty(HEAD, dtype=torch.int32, device=marks.device)
        stats = stages.make_stats(vectors, is_clear=True)
        found = stages.collect(vectors, head, stats, marks, capacity)
        chunks = launch_measure(found[0], stats, is_counted=True)
        numbers = stats.tolist()
        if numbers[0] <= capacity:
            return _noted(found, numbers[0], vectors.n, numbers, chunks)
        capacity = numbers[0]


def _noted(chosen: Chosen, count: int, n: int, numbers: list[int], chunks: Tensor) -> Chosen:
    """The first `count` of a row, with what is known of them."""
    indices, values = chosen
    if count < indices.numel():  # `len` takes torch ten times as long
        indices, values = indices[:count], values[:count]
    if count:
        note(indices, gaps=(n, measurement(numbers, count, chunks)))
    return indices, note(values, finite=not numbers[1])
