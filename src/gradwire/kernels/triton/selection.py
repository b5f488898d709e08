"""Elements of large magnitude: a threshold from a sample, one pass that marks what reaches it, and
an exact selection among those (`_stages.py`).

The host waits once, for whether the sample misled (then all elements become candidates) and for
what the code of the positions needs to know; that is noted on the positions (`_notes.py`).
"""

import math
import struct

import torch
from torch import Tensor

from gradwire.kernels._motion import Residual
from gradwire.kernels._notes import note
from gradwire.kernels.triton import _stages as stages
from gradwire.kernels.triton._candidates import HEAD, STATS
from gradwire.kernels.triton._common import key_words
from gradwire.kernels.triton._stages import Chosen, Vectors
from gradwire.kernels.triton.gaps import launch_measure, measurement


def select_largest(x: Tensor, residual: Residual | None, count: int, out: Tensor | None) -> Chosen:
    return select_largest_rows(*stages.as_row(x, residual), count, stages.one_row(out))[0]


def select_largest_rows(
    x: Tensor, residual: Residual | None, count: int, out: Tensor | None
) -> list[Chosen]:
    """`select_largest` of every row, in the time of one."""
    vectors, (rows, n) = stages.vectors_of(x, residual, out), x.shape
    if not count:
        stages.mark(vectors, None, stages.NOTHING)
        return [(x.new_empty(0, dtype=torch.int64), x.new_empty(0)) for _ in range(rows)]
    chosen = _select(vectors, count, *_guess(n, count))
    if chosen is None:  # the sample misled: all elements are candidates
        chosen = _select(vectors, count, 0, n)
    assert chosen is not None
    return chosen


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
    vectors = stages.vectors_of(*stages.as_row(x, residual), stages.one_row(out))
    head = stages.sample_strata(vectors, size, rank, key_words(seed, stream))
    marks = stages.mark(vectors, head, 0)
    room = math.ceil((rank + 6 * math.sqrt(rank) + 8) / size * n) + 4096
    while True:
        room = min(n, room)
        indices = torch.empty(1, min(most, room), dtype=torch.int64, device=x.device)
        kept = indices, torch.empty(indices.shape, dtype=torch.float32, device=x.device)
        stats = torch.zeros(1, STATS, dtype=torch.int64, device=x.device)
        found = stages.collect(vectors, head, stats, marks, room)
        stages.keep(vectors, head, stats, found, kept, is_capped=True)
        chunks = launch_measure(indices, stats, is_counted=True)
        numbers = stats[0].tolist()
        if numbers[0] <= room:
            return _noted(kept, min(numbers[0], most), n, numbers, chunks[0])
        room = numbers[0]
        head[:, 2:] = 0  # what was counted


def select_above(
    x: Tensor, residual: Residual | None, threshold: float, capacity: int, out: Tensor | None
) -> Chosen:
    x, residual = stages.as_row(x, residual)
    vectors = stages.vectors_of(x, residual, stages.one_row(out))
    (bits,) = struct.unpack("<i", struct.pack("<f", threshold))
    return _collect_all(vectors, stages.mark(vectors, None, min(bits, 0x7F800000)), capacity)


def collect_marked(
    x: Tensor, residual: Residual | None, marks: tuple[Tensor, Tensor], capacity: int
) -> Chosen:
    """Positions and values of the elements with a one in a bitmap, given with the counts of each
    tile: a second time if they are more than `capacity`."""
    return _collect_all(stages.vectors_of(*stages.as_row(x, residual), None), marks, capacity)


def _select(vectors: Vectors, count: int, rank: int, room: int) -> list[Chosen] | None:
    """The `count` largest of every row, among what reaches the `rank` in its sample; None if that
    are not enough, or more than there is room for."""
    x = vectors.x
    rows, n = x.shape
    indices = torch.empty(rows, count, dtype=torch.int64, device=x.device)
    values = torch.empty(rows, count, dtype=torch.float32, device=x.device)
    kept = indices, values
    if n <= stages.FEW:
        stats = torch.empty(rows, STATS, dtype=torch.int64, device=x.device)
        stages.keep_few(vectors, stats, stats, kept, kept, n, is_direct=True)
    else:
        head, stats = stages.sample(vectors, rank)
        found = stages.collect(vectors, head, stats, stages.mark(vectors, head, 0), room)
        stages.keep(vectors, head, stats, found, kept)
    chunks = launch_measure(indices, stats)
    numbers = stats.tolist()
    if not all(count <= row[0] <= room for row in numbers):
        return None
    return [
        (
            note(indices[r], gaps=(n, measurement(numbers[r], count, chunks[r]))),
            note(values[r], finite=not numbers[r][1]),
        )
        for r in range(rows)
    ]


def _guess(n: int, count: int) -> tuple[int, int]:
    """A rank in a sample that is likely to be below the `count` largest, 0 if all elements are
    to be candidates, and room for the candidates."""
    samples = stages.sample_size(n)
    if n <= stages.FEW or n < samples:
        return 0, n
    expected = samples * count / n
    rank = math.ceil(1.05 * expected + 5 * math.sqrt(expected) + 8)
    if rank >= samples:
        return 0, n
    return rank, min(n, math.ceil((rank + 6 * math.sqrt(rank)) / samples * n) + 4096)


def _collect_all(vectors: Vectors, marks: tuple[Tensor, Tensor], capacity: int) -> Chosen:
    x = vectors.x
    while True:
        head = torch.empty(1, HEAD, dtype=torch.int32, device=x.device)
        stats = torch.zeros(1, STATS, dtype=torch.int64, device=x.device)
        positions, values = stages.collect(vectors, head, stats, marks, capacity)
        chunks = launch_measure(positions, stats, is_counted=True)
        numbers = stats[0].tolist()
        if numbers[0] <= capacity:
            return _noted((positions, values), numbers[0], x.numel(), numbers, chunks[0])
        capacity = numbers[0]


def _noted(chosen: Chosen, count: int, n: int, numbers: list[int], chunks: Tensor) -> Chosen:
    """The first `count` of a row, with what is known of them."""
    indices, values = chosen[0][0, :count], chosen[1][0, :count]
    if count:
        note(indices, gaps=(n, measurement(numbers, count, chunks)))
    return indices, note(values, finite=not numbers[1])
