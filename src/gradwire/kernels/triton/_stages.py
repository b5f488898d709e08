"""Starts the kernels of a selection (`_candidates.py`, `_ranking.py`), stage by stage.

Memory of these stages is flat, row behind row. Between two launches the host does as little as it
can: a tensor that is made, viewed or sliced takes it as long as a short kernel takes the device.
"""

import torch
from torch import Tensor

from gradwire.kernels.triton import _candidates as candidates
from gradwire.kernels.triton import _listing as listing
from gradwire.kernels.triton import _ranking as ranking
from gradwire.kernels.triton._candidates import HEAD, STATS, TILE_WORDS
from gradwire.kernels.triton._common import cdiv, launch, power_of_two
from gradwire.kernels.triton._vectors import Vectors
from gradwire.kernels.triton._vectors import vectors_of as vectors_of
from gradwire.kernels.triton.gaps import CHUNK, LAST, UNRANKED, launch_measure, make_sums

FEW = 1 << 14  # so many elements one program selects from
# Elements of a sample, and of how many they are: of few a shorter one is found sooner than it makes
# more candidates.
_SAMPLES = ((1 << 20, 1 << 14), (1 << 16, 1 << 13), (0, 1 << 12))
_FEW_SAMPLES = 1 << 15  # so many one program ranks; `bits_of_rank` counts up to 2^16 - 1
_RUN = 8  # elements of a sample in a row: 32 bytes are read at least
_DRAWN = 64  # blocks of four elements of a sample that a program draws
_CHUNK = 2048  # candidates of a program
_MOST_PROGRAMS = 1024  # each adds up the counts of those before it
_TILES_AT_ONCE = 4
_MOST_LISTED = 1 << 22  # elements that are kept; of more too many share a bin
_LISTED = 1 << 12  # candidates of a bin
NOTHING = 0x7FFFFFFF  # as a threshold

Chosen = tuple[Tensor, Tensor]


def sample_size(n: int) -> int:
    return next(samples for least, samples in _SAMPLES if n >= least)


def make_chosen(vectors: Vectors, room: int) -> Chosen:
    """Memory for positions and values of `room` elements of each row."""
    device = vectors.inputs[0].device
    indices = torch.empty(vectors.rows * room, dtype=torch.int64, device=device)
    return indices, torch.empty(vectors.rows * room, dtype=torch.float32, device=device)


def make_stats(vectors: Vectors, is_clear: bool) -> Tensor:
    make = torch.zeros if is_clear else torch.empty
    return make(vectors.rows * STATS, dtype=torch.int64, device=vectors.inputs[0].device)


def sample(vectors: Vectors, rank: int) -> tuple[Tensor, Tensor]:
    """A new `head` with the threshold, 0 if there is no rank, and empty statistics."""
    rows, n = vectors.rows, vectors.n
    make = torch.empty if rank else torch.zeros
    head = make(rows * HEAD, dtype=torch.int32, device=vectors.inputs[0].device)
    stats = make_stats(vectors, is_clear=not rank)
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
            SAMPLES=samples,
            RUN=_RUN,
            HEAD=HEAD,
            STATS=STATS,
            num_warps=power_of_two(samples // 512),
        )
    return head, stats


def sample_strata(
    vectors: Vectors, size: int, rank: int, words: tuple[int, int, int, int, int]
) -> tuple[Tensor, Tensor]:
    """A new `head` with the threshold that `rank` elements of a sample reach, and then zeros; and
    empty statistics."""
    device = vectors.inputs[0].device
    few = size <= min(_FEW_SAMPLES, 2 * FEW)
    head = (torch.empty if few else torch.zeros)(HEAD, dtype=torch.int32, device=device)
    samples = torch.empty(size, dtype=torch.float32, device=device)
    form = vectors.form
    launch(
        ranking.draw_sample,
        (cdiv(size, 4 * _DRAWN),),
        *vectors.inputs,
        head,
        samples,
        vectors.n,
        size,
        *words,
        *vectors.rule,
        KIND=form["KIND"],
        NESTEROV=form["NESTEROV"],
        BLOCKS=_DRAWN,
    )
    if few:
        tile = max(256, power_of_two(size))
        warps = _warps(tile)
        stats = make_stats(vectors, is_clear=False)
        options = {"TILE": tile, "HEAD": HEAD, "STATS": STATS, "num_warps": warps}
        launch(ranking.rank_few, (1,), samples, head, stats, size, rank, **options)
    else:
        stats = make_stats(vectors, is_clear=True)
        _count_digits(head, samples, 1, size, rank, keeps=False)
        launch(ranking.rank_many, (1,), head, rank, HEAD=HEAD)
    return head, stats


def mark(vectors: Vectors, head: Tensor | None, threshold: int) -> Tensor:
    """The pass: bits of what reaches the threshold of `head`, or else the given one, and counts of
    each tile. What reaches a given one is cleared in what is left."""
    rows, n = vectors.rows, vectors.n
    tiles = cdiv(n, 32 * TILE_WORDS)
    size = rows * tiles * (TILE_WORDS + 1)
    marks = torch.empty(size, dtype=torch.int32, device=vectors.inputs[0].device)
    launch(
        candidates.mark,
        (tiles, rows),
        *vectors.inputs,
        *vectors.outputs,
        marks if head is None else head,
        marks,
        n,
        threshold,
        *vectors.rule,
        **vectors.form,
        **vectors.writes,
        CLEAR=head is None,
        HEAD=HEAD,
        WORDS=TILE_WORDS,
        num_warps=8,
    )
    return marks


def bin_shift(vectors: Vectors, room: int, count: int) -> int:
    """How wide, as a power of two, the bins are of which `count` of at most `room` candidates are
    to be found by `split`; 0 if not. There a thousand or two share a bin of normal numbers, and
    the bins reach from one threshold to half as much again, or to a multiple."""
    if room <= FEW or vectors.rows > 1 or count > _MOST_LISTED:
        return 0
    return min(14, max(11, 31 - count.bit_length()))


def collect(
    vectors: Vectors, head: Tensor, stats: Tensor, marks: Tensor, room: int, shift: int = 0
) -> Chosen:
    """Positions and values of what is marked; how many there are is in `head` and `stats`, and if
    there is a `bin_shift` how many are in each bin."""
    positions, values = make_chosen(vectors, room)
    tiles = cdiv(vectors.n, 32 * TILE_WORDS)
    span = _TILES_AT_ONCE * cdiv(tiles, _TILES_AT_ONCE * _MOST_PROGRAMS)
    launch(
        candidates.collect,
        (cdiv(tiles, span), vectors.rows) if tiles else (0,),
        *vectors.inputs,
        head,
        stats,
        marks,
        positions,
        values,
        vectors.n,
        tiles,
        span,
        room,
        shift,
        *vectors.rule,
        **vectors.form,
        HEAD=HEAD,
        STATS=STATS,
        WORDS=TILE_WORDS,
        AT_ONCE=_TILES_AT_ONCE * TILE_WORDS,
        COUNTS=shift > 0,
        num_warps=8,
    )
    return positions, values


def keep(
    vectors: Vectors,
    head: Tensor,
    stats: Tensor,
    found: Chosen,
    room: int,
    kept: Chosen,
    count: int,
    shift: int = 0,
    is_capped: bool = False,
) -> Tensor:
    """The `count` largest of at most `room` candidates; if `is_capped` all of them, where they are
    fewer. Returns what `launch_measure` does of them. With a `bin_shift` nothing may be kept:
    `read` knows."""
    if room <= FEW:
        return keep_few(vectors, head, stats, found, room, kept, count, False, is_capped)
    if shift:
        _keep_listed(vectors, head, stats, found, room, kept, count, shift, is_capped)
    else:
        _keep_many(vectors, head, found, room, kept, count, is_capped)
    return launch_measure(kept[0], stats, vectors.rows, is_counted=is_capped)


def read(
    vectors: Vectors,
    head: Tensor,
    stats: Tensor,
    found: Chosen,
    room: int,
    kept: Chosen,
    count: int,
    chunks: Tensor,
    is_capped: bool = False,
) -> tuple[list[int], Tensor]:
    """Waits for the statistics, and keeps what `keep` could not, because of one vector too many
    share a bin. Returns the chunks' sums as well."""
    numbers: list[int] = stats.tolist()
    if not numbers[UNRANKED]:
        return numbers, chunks
    head[2:] = 0
    stats[LAST:] = 0
    _keep_many(vectors, head, found, room, kept, count, is_capped)
    chunks = launch_measure(kept[0], stats, is_counted=is_capped)
    return stats.tolist(), chunks


def keep_few(
    vectors: Vectors,
    head: Tensor,
    stats: Tensor,
    found: Chosen,
    room: int,
    kept: Chosen,
    count: int,
    is_direct: bool,
    is_capped: bool = False,
) -> Tensor:
    """Of at most FEW elements, which are measured in the same launch."""
    tile = max(256, power_of_two(room))
    sums, _ = make_sums(kept[0], count, vectors.rows)
    launch(
        ranking.keep_few,
        (1, vectors.rows),
        *vectors.inputs,
        *vectors.outputs,
        head,
        stats,
        *found,
        *kept,
        sums,
        vectors.n,
        count,
        room,
        *vectors.rule,
        **vectors.form,
        **vectors.writes,
        HEAD=HEAD,
        STATS=STATS,
        DIRECT=is_direct,
        CAPPED=is_capped,
        TILE=tile,
        CHUNK=min(tile, CHUNK),
        num_warps=_warps(tile),
    )
    return sums


def _keep_listed(
    vectors: Vectors,
    head: Tensor,
    stats: Tensor,
    found: Chosen,
    room: int,
    kept: Chosen,
    count: int,
    shift: int,
    is_capped: bool,
) -> None:
    positions, values = found
    chunks = cdiv(room, _CHUNK)
    scratch = torch.empty(2 * _LISTED + chunks, dtype=torch.int32, device=head.device)
    chunk_counts = scratch[2 * _LISTED :]
    options = {"CAPPED": is_capped, "LISTED": _LISTED, "CHUNK": _CHUNK, "num_warps": 8}
    launch(
        listing.split,
        (chunks,),
        head,
        stats,
        values,
        chunk_counts,
        scratch,
        count,
        room,
        shift,
        **options,
    )
    launch(
        listing.keep_listed,
        (chunks,),
        *vectors.outputs,
        head,
        positions,
        values,
        chunk_counts,
        scratch,
        *kept,
        count,
        room,
        shift,
        **vectors.writes,
        **options,
    )


def _keep_many(
    vectors: Vectors,
    head: Tensor,
    found: Chosen,
    room: int,
    kept: Chosen,
    count: int,
    is_capped: bool,
) -> None:
    rows, n = vectors.rows, vectors.n
    batch = rows > 1
    chunks = cdiv(room, _CHUNK)
    _count_digits(head, found[1], rows, room, count, keeps=True)
    chunk_counts = torch.empty(rows * 2 * chunks, dtype=torch.int32, device=head.device)
    launch(
        ranking.count_kept,
        (chunks, rows),
        head,
        found[1],
        chunk_counts,
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
        chunk_counts,
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


def _count_digits(
    head: Tensor, values: Tensor, rows: int, room: int, rank: int, keeps: bool
) -> None:
    """Counts in `head` of each digit of the least of the `rank` largest magnitudes; of none if it
    `keeps` all."""
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
            KEEPS=keeps,
            BATCH=rows > 1,
            HEAD=HEAD,
            CHUNK=_CHUNK,
            num_warps=8,
        )


def _warps(tile: int) -> int:
    return min(32, max(4, min(8, tile // 256), tile // 512))
