"""Starts the kernels of a selection (`_candidates.py`, `_ranking.py`), stage by stage."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.kernels._motion import Motion, Residual
from gradwire.kernels.triton import _candidates as candidates
from gradwire.kernels.triton import _ranking as ranking
from gradwire.kernels.triton._candidates import HEAD, STATS, TILE_WORDS
from gradwire.kernels.triton._common import cdiv, launch, power_of_two
from gradwire.kernels.triton.strata import BLOCKS

FEW = 1 << 14  # so many elements one program selects from
SHORT_SAMPLE, LONG_SAMPLE = 1 << 12, 1 << 14
LONG = 1 << 16  # elements from which on the sample is the long one
_RUN = 8  # elements of a sample in a row: 32 bytes are read at least
_CHUNK = 4096  # candidates of a program
_MOST_PROGRAMS = 1024  # each adds up the counts of those before it
_TILES_AT_ONCE = 4
NOTHING = 0x7FFFFFFF  # as a threshold

Chosen = tuple[Tensor, Tensor]


class Vectors(NamedTuple):
    """What p is formed from, and what is written beside: all [rows, n]."""

    x: Tensor
    residual: Tensor
    velocity: Tensor
    moved: Tensor
    out: Tensor
    rule: tuple[float, float]
    form: dict[str, Any]
    writes: dict[str, bool]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.residual, self.velocity

    @property
    def outputs(self) -> tuple[Tensor, Tensor]:
        return self.moved, self.out


def vectors_of(x: Tensor, residual: Residual | None, out: Tensor | None) -> Vectors:
    x = x.contiguous()
    form = {"KIND": 0, "NESTEROV": False}
    writes = {"MASKS": False, "HAS_OUT": out is not None}
    left = x if out is None else out
    if residual is None:
        return Vectors(x, x, x, x, left, (0.0, 0.0), form, writes)
    if not isinstance(residual, Motion):
        form["KIND"] = 1
        return Vectors(x, residual.contiguous(), x, x, left, (0.0, 0.0), form, writes)
    motion = residual
    form = {"KIND": 2, "NESTEROV": motion.nesterov}
    writes["MASKS"] = motion.masks
    return Vectors(
        x,
        motion.residual.contiguous(),
        motion.velocity.contiguous(),
        motion.moved,
        left,
        (float(motion.momentum), float(motion.scale)),
        form,
        writes,
    )


def sample_size(n: int) -> int:
    return LONG_SAMPLE if n >= LONG else SHORT_SAMPLE


def sample(vectors: Vectors, rank: int) -> tuple[Tensor, Tensor]:
    """A new `head` with the threshold, 0 if there is no rank, and empty statistics."""
    x = vectors.x
    rows, n = x.shape
    make = torch.empty if rank else torch.zeros
    head = make(rows, HEAD, dtype=torch.int32, device=x.device)
    stats = make(rows, STATS, dtype=torch.int64, device=x.device)
    if rank:
        samples = sample_size(n)
        launch(
            candidates.sample,
            (1, rows),
            *vectors.inputs,
            head,
            stats,
            n,
            rank,
            *vectors.rule,
            **vectors.form,
            BATCH=rows > 1,
            SAMPLES=samples,
            RUN=_RUN,
            HEAD=HEAD,
            STATS=STATS,
            num_warps=power_of_two(samples // 512),
        )
    return head, stats


def sample_strata(
    vectors: Vectors, size: int, rank: int, words: tuple[int, int, int, int, int]
) -> Tensor:
    """A new `head` with the threshold that `rank` elements of a sample reach."""
    x = vectors.x
    head = torch.zeros(1, HEAD, dtype=torch.int32, device=x.device)
    samples = torch.empty(1, size, dtype=torch.float32, device=x.device)
    launch(
        ranking.draw_sample,
        (cdiv(size, 4 * BLOCKS),),
        *vectors.inputs,
        head,
        samples,
        x.numel(),
        size,
        *words,
        *vectors.rule,
        **vectors.form,
        BLOCKS=BLOCKS,
    )
    if size <= FEW:
        tile = max(256, power_of_two(size))
        warps = _warps(tile)
        launch(ranking.rank_few, (1,), samples, head, size, rank, TILE=tile, num_warps=warps)
    else:
        _count_digits(head, samples, rank)
        launch(ranking.rank_many, (1,), head, rank, HEAD=HEAD)
    return head


def mark(vectors: Vectors, head: Tensor | None, threshold: int) -> tuple[Tensor, Tensor]:
    """The pass: bits of what reaches the threshold of `head`, or else the given one, and counts of
    each tile. What reaches a given one is cleared in what is left."""
    x = vectors.x
    rows, n = x.shape
    tiles = cdiv(n, 32 * TILE_WORDS)
    bitmap = torch.empty(rows, tiles * TILE_WORDS, dtype=torch.int32, device=x.device)
    counts = torch.empty(rows, tiles, dtype=torch.int32, device=x.device)
    launch(
        candidates.mark,
        (tiles, rows),
        *vectors.inputs,
        *vectors.outputs,
        counts if head is None else head,
        bitmap,
        counts,
        n,
        threshold,
        *vectors.rule,
        **vectors.form,
        **vectors.writes,
        CLEAR=head is None,
        BATCH=rows > 1,
        HEAD=HEAD,
        WORDS=TILE_WORDS,
        num_warps=8,
    )
    return bitmap, counts


def collect(
    vectors: Vectors, head: Tensor, stats: Tensor, marks: tuple[Tensor, Tensor], room: int
) -> tuple[Tensor, Tensor]:
    """Positions and values of what is marked; how many there are is in `head` and `stats`."""
    bitmap, counts = marks
    rows, tiles = counts.shape
    positions = torch.empty(rows, room, dtype=torch.int64, device=head.device)
    values = torch.empty(rows, room, dtype=torch.float32, device=head.device)
    span = _TILES_AT_ONCE * cdiv(tiles, _TILES_AT_ONCE * _MOST_PROGRAMS)
    launch(
        candidates.collect,
        (cdiv(tiles, span), rows) if tiles else (0,),
        *vectors.inputs,
        head,
        stats,
        bitmap,
        counts,
        positions,
        values,
        vectors.x.shape[1],
        tiles,
        span,
        room,
        *vectors.rule,
        **vectors.form,
        BATCH=rows > 1,
        HEAD=HEAD,
        STATS=STATS,
        WORDS=TILE_WORDS,
        AT_ONCE=_TILES_AT_ONCE * TILE_WORDS,
    )
    return positions, values


def keep(
    vectors: Vectors,
    head: Tensor,
    stats: Tensor,
    found: Chosen,
    kept: Chosen,
    is_capped: bool = False,
) -> None:
    """The largest of the candidates; if `is_capped` all of them, where they are fewer."""
    room = found[0].shape[1]
    if room <= FEW:
        keep_few(vectors, head, stats, found, kept, room, is_direct=False, is_capped=is_capped)
    else:
        _keep_many(vectors, head, found, kept, is_capped)


def keep_few(
    vectors: Vectors,
    head: Tensor,
    stats: Tensor,
    found: Chosen,
    kept: Chosen,
    room: int,
    is_direct: bool,
    is_capped: bool = False,
) -> None:
    rows, n = vectors.x.shape
    tile = max(256, power_of_two(room))
    launch(
        ranking.keep_few,
        (1, rows),
        *vectors.inputs,
        *vectors.outputs,
        head,
        stats,
        *found,
        *kept,
        n,
        kept[0].shape[1],
        room,
        *vectors.rule,
        **vectors.form,
        **vectors.writes,
        BATCH=rows > 1,
        HEAD=HEAD,
        STATS=STATS,
        DIRECT=is_direct,
        CAPPED=is_capped,
        TILE=tile,
        num_warps=_warps(tile),
    )


def _keep_many(
    vectors: Vectors, head: Tensor, found: Chosen, kept: Chosen, is_capped: bool
) -> None:
    rows, n = vectors.x.shape
    room, count = found[0].shape[1], kept[0].shape[1]
    batch = rows > 1
    chunks = cdiv(room, _CHUNK)
    _count_digits(head, found[1], count)
    above, equal = torch.empty(2, rows, chunks, dtype=torch.int32, device=head.device)
    launch(
        ranking.count_kept,
        (chunks, rows),
        head,
        found[1],
        above,
        equal,
        count,
        room,
        BATCH=batch,
        HEAD=HEAD,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    launch(
        ranking.keep_many,
        (chunks, rows),
        *vectors.outputs,
        head,
        *found,
        above,
        equal,
        *kept,
        n,
        count,
        room,
        **vectors.writes,
        CAPPED=is_capped,
        BATCH=batch,
        HEAD=HEAD,
        CHUNK=_CHUNK,
        num_warps=8,
    )


def _count_digits(head: Tensor, values: Tensor, rank: int) -> None:
    """Counts in `head` of each digit of the least of the `rank` largest magnitudes."""
    rows, room = values.shape
    for level, shift in enumerate(ranking.SHIFTS):
        launch(
            ranking.count_digits,
            (cdiv(room, _CHUNK), rows),
            head,
            values,
            rank,
            room,
            LEVEL=level,
            SHIFT=shift,
            BATCH=rows > 1,
            HEAD=HEAD,
            CHUNK=_CHUNK,
            num_warps=8,
        )


def _warps(tile: int) -> int:
    return min(32, max(4, tile // 512))


def as_row(x: Tensor, residual: Residual | None) -> tuple[Tensor, Residual | None]:
    if not isinstance(residual, Motion):
        return x[None], one_row(residual)
    vectors = (residual.residual, residual.velocity, residual.moved)
    return x[None], residual.with_vectors(*(vector[None] for vector in vectors))


def one_row(x: Tensor | None) -> Tensor | None:
    return None if x is None else x[None]
