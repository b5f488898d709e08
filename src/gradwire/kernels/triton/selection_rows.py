"""A sampled selection of each row of a matrix, in the launches of one.

The sample of a row is drawn with a key of its own; the stages behind it are those of one vector
(`selection.py`), which know rows. The host waits once, for the counts of all rows.
"""

import math
from collections.abc import Sequence
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels._motion import Residual
from gradwire.kernels._notes import note
from gradwire.kernels.triton import _stages as stages
from gradwire.kernels.triton._candidates import (
    HEAD,
    STATS,
    bits_of_rank,
    form_some,
    magnitude,
)
from gradwire.kernels.triton._common import cdiv, key_words, launch, power_of_two
from gradwire.kernels.triton._ranking import _state_after
from gradwire.kernels.triton._stages import Chosen, Vectors
from gradwire.kernels.triton.strata import BLOCKS, strata_block

Stream = tuple[int, tuple[int, int, int]]  # a seed, and the words of a stream

_WORDS = 5  # of a key


def select_sampled_rows(
    x: Tensor,
    residual: Residual | None,
    size: int,
    rank: int,
    keys: Sequence[Stream],
    most: int,
    out: Tensor | None,
) -> list[Chosen]:
    """`select_sampled` of every row of x, [rows, n], each with its own key."""
    rows, n = x.shape
    vectors = stages.vectors_of(x, residual, out, rows)
    head = _thresholds(vectors, size, rank, keys)
    marks = stages.mark(vectors, head, 0)
    room = math.ceil((rank + 6 * math.sqrt(rank) + 8) / size * n) + 4096
    while True:
        room = min(n, room)
        count = min(most, room)
        kept, stats = stages.make_chosen(vectors, count), stages.make_stats(vectors, is_clear=True)
        found = stages.collect(vectors, head, stats, marks, room)
        stages.keep(vectors, head, stats, found, room, kept, count, is_capped=True)
        numbers = stats.cpu().view(rows, STATS)[:, :2].tolist()
        largest = max(found for found, _ in numbers)
        if largest <= room:
            return _cut(kept, count, numbers)
        room = largest
        head.view(rows, HEAD)[:, 2:] = 0  # what was counted


def _cut(kept: Chosen, room: int, numbers: Sequence[Sequence[int]]) -> list[Chosen]:
    """Of rows with room for so many, what was found of each, with what is known of it: how many
    elements reach the threshold, and whether one is not finite."""
    used = [min(found, room) for found, _ in numbers]
    sizes = [size for own in used for size in (own, room - own)]
    indices, values = (own.view(-1).split_with_sizes(sizes)[::2] for own in kept)
    return [
        (positions, note(entries, finite=not spoiled))
        for positions, entries, (_, spoiled) in zip(indices, values, numbers)
    ]


def _thresholds(vectors: Vectors, size: int, rank: int, keys: Sequence[Stream]) -> Tensor:
    """A new `head` with the threshold that `rank` elements of each row's sample reach."""
    rows, form, device = vectors.rows, vectors.form, vectors.inputs[0].device
    head = torch.zeros(rows * HEAD, dtype=torch.int32, device=device)
    samples = torch.empty(rows * size, dtype=torch.float32, device=device)
    words = list(chain.from_iterable(key_words(*key) for key in keys))
    launch(
        _draw,
        (cdiv(size, 4 * BLOCKS), rows),
        *vectors.inputs,
        head,
        samples,
        torch.tensor(words, dtype=torch.int32).to(device),
        vectors.n,
        size,
        *vectors.rule,
        KIND=form["KIND"],
        NESTEROV=form["NESTEROV"],
        HEAD=HEAD,
        WORDS=_WORDS,
        BLOCKS=BLOCKS,
    )
    if size <= stages.FEW:
        tile = max(256, power_of_two(size))
        warps = min(32, max(4, tile // 512))
        launch(_rank_few, (rows,), samples, head, size, rank, HEAD=HEAD, TILE=tile, num_warps=warps)
    else:
        stages._count_digits(head, samples, rows, size, rank, keeps=False)
        launch(_rank_many, (rows,), head, rank, HEAD=HEAD)
    return head


@triton.jit(do_not_specialize=["numel", "count"])
def _draw(
    x,
    residual,
    velocity,
    head,
    samples,
    words,
    numel,
    count,
    momentum,
    scale,
    KIND: tl.constexpr,
    NESTEROV: tl.constexpr,
    HEAD: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One element of each stratum of each row as a candidate."""
    row = tl.program_id(1).to(tl.int64)
    words += row * WORDS
    k0, k1 = tl.load(words), tl.load(words + 1)
    s0, s1, s2 = tl.load(words + 2), tl.load(words + 3), tl.load(words + 4)
    stratum, at, _size = strata_block(numel, count, k0, k1, s0, s1, s2, BLOCKS)
    drawn = stratum < count
    at += row * numel
    p = form_some(x, residual, velocity, at, drawn, momentum, scale, KIND, NESTEROV)
    tl.store(samples + row * count + stratum, p, mask=drawn)
    if tl.program_id(0) == 0:
        tl.store(head + row * HEAD + 1, count)


@triton.jit(do_not_specialize=["count", "rank"])
def _rank_few(samples, head, count, rank, HEAD: tl.constexpr, TILE: tl.constexpr):
    """The least magnitude of the `rank` largest, above zero, as threshold; a program for a row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    bits = magnitude(tl.load(samples + row * count + lane, mask=lane < count, other=0))
    least = bits_of_rank(bits, lane < count, count, rank, 0, 0)
    tl.store(head + row * HEAD, tl.maximum(least, 1))


@triton.jit(do_not_specialize=["rank"])
def _rank_many(head, rank, HEAD: tl.constexpr):
    """The same after the digits were counted, whose counts it clears."""
    head += tl.program_id(0).to(tl.int64) * HEAD
    least, _ties = _state_after(head, rank, 4)
    place = tl.arange(0, HEAD)
    tl.debug_barrier()
    tl.store(head + place, tl.where(place == 0, tl.maximum(least, 1), 0))
