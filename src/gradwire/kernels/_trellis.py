"""Trellis-coded quantisation on the CPU; reference/trellis.py specifies the computation."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_packed
from gradwire.kernels._dispatch import pick
from gradwire.kernels.native import trellis as native
from gradwire.kernels.reference import trellis as reference
from gradwire.kernels.reference import trellis_fit as reference_fit
from gradwire.kernels.reference import trellis_search as reference_search
from gradwire.kernels.reference import trellis_tables as reference_tables
from gradwire.kernels.reference.trellis import (
    BLOCK,
    CLASSES,
    LARGEST,
    PRECISION,
    TAIL_PRECISION,
    TOKENS,
    UNIT,
)

_CPU = torch.device("cpu")
MOST_SCALED = UNIT * (2 * LARGEST - 3)  # so that no index the search looks at is too large


def trellis_scale(x: Tensor, factor: float, most: int) -> Tensor:
    """x * factor in x's dtype, rounded (ties to even), within -most .. most, as int32."""
    if x.dtype not in (torch.float32, torch.float64) or x.dim() != 1 or x.device != _CPU:
        raise ValueError(
            f"trellis_scale takes a vector of float32 or float64 on the CPU, got {x.dtype} "
            f"{list(x.shape)} on {x.device}"
        )
    if not 0 <= most <= 1 << 24:  # whole numbers up to there have a float32
        raise ValueError(f"trellis_scale takes a range of 0 .. 2^24, got {most}")
    return pick(_CPU, native.trellis_scale, reference_fit.trellis_scale)(x, factor, most)


def trellis_search(
    scaled: Tensor, contexts: Tensor, rates: Tensor, offsets: Tensor, signed: bool = False
) -> Tensor:
    """Indices (int32) of least squared error plus rate for numbers in 1/64 of a step (int32).

    `rates` (int32 [8, 16]) are those of 0, of 1, of 2 and of one more, for each class: the rows of
    quantiser 0, then of quantiser 1, in units of a squared 1/64 step. `offsets` (int32 [6]) move
    the values of |k| = 1, 2 and more towards zero, in quantiser 0 and 1.
    """
    check_vectors("trellis_search", scaled=(scaled, torch.int32), contexts=(contexts, torch.uint8))
    check_table("trellis_search", "rates", rates, (8, CLASSES), 0, 1 << 17)
    check_table("trellis_search", "offsets", offsets, (6,), -UNIT, UNIT)
    check_lengths("trellis_search", scaled, contexts)
    check_range("trellis_search", scaled, MOST_SCALED)
    check_contexts("trellis_search", contexts)
    run = pick(_CPU, native.trellis_search, reference_search.trellis_search)
    return run(scaled, contexts, rates, offsets, signed)


def trellis_contexts(
    scaled: Tensor, indices: Tensor | None, shapes: Tensor, segments: int, signed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The contexts of indices (uint8), how often each index occurs in them, and their errors.

    Counts (int64 [32, 4]) are of 0, of 1, of more, and by how much more than 2 all of them are.
    Errors (int64 [6, 2]) are for |k| = 1, 2, more in either quantiser: how many, and the sum of
    what they are too large. Without indices they are estimated, for both quantisers at once.
    """
    check_vectors("trellis_contexts", scaled=(scaled, torch.int32))
    check_range("trellis_contexts", scaled, MOST_SCALED)
    if indices is not None:
        check_vectors("trellis_contexts", indices=(indices, torch.int32))
        check_lengths("trellis_contexts", scaled, indices)
        check_range("trellis_contexts", indices, LARGEST)
    check_shapes("trellis_contexts", shapes, segments, scaled.numel())
    run = pick(_CPU, native.trellis_contexts, reference.trellis_contexts)
    return run(scaled, indices, shapes, segments, signed)


def trellis_counts(
    scaled: Tensor, indices: Tensor, contexts: Tensor, signed: bool = False
) -> tuple[Tensor, Tensor]:
    """Counts and errors as of `trellis_contexts`, for contexts whose classes are given."""
    check_vectors("trellis_counts", scaled=(scaled, torch.int32), indices=(indices, torch.int32))
    check_vectors("trellis_counts", contexts=(contexts, torch.uint8))
    check_lengths("trellis_counts", scaled, indices)
    check_lengths("trellis_counts", scaled, contexts)
    check_range("trellis_counts", scaled, MOST_SCALED)
    check_range("trellis_counts", indices, LARGEST)
    check_contexts("trellis_counts", contexts)
    run = pick(_CPU, native.trellis_counts, reference.trellis_counts)
    return run(scaled, indices, contexts, signed)


def trellis_fit(
    scaled: Tensor,
    shapes: Tensor,
    segments: int,
    levels: Tensor | None,
    offsets: Tensor,
    signed: bool,
    rounds: int,
    passes: int,
    stride: int,
) -> reference_fit.Fit:
    """Indices and tables that fit each other: see reference/trellis_fit.py.

    With `levels` (int8 [32, 3]) and `offsets` (int32 [6]) the search takes those; without, some
    that converge in `rounds` on one block of every `stride`. The last of `passes` gives the
    indices, their contexts, the levels and offsets of these, the digits of the levels, the bits of
    all, and the squared error and the energy of one block of every `stride`.
    """
    check_vectors("trellis_fit", scaled=(scaled, torch.int32))
    check_range("trellis_fit", scaled, MOST_SCALED)
    check_table("trellis_fit", "offsets", offsets, (6,), -UNIT, UNIT)
    if levels is not None:
        most = reference_tables.LEVEL
        check_table("trellis_fit", "levels", levels, (2 * CLASSES, 3), -most, most, torch.int8)
    check_shapes("trellis_fit", shapes, segments, scaled.numel())
    if rounds < 0 or passes < 1 or stride < 1:
        raise ValueError(f"trellis_fit: {rounds} rounds, {passes} passes, every {stride} blocks")
    run = pick(_CPU, native.trellis_fit, reference_fit.trellis_fit)
    return run(scaled, shapes, segments, levels, offsets, signed, rounds, passes, stride)


def trellis_squares(
    scaled: Tensor, indices: Tensor, contexts: Tensor, offsets: Tensor, stride: int
) -> tuple[float, float]:
    """The squared error and the energy of one block of every `stride`, as of `trellis_fit`."""
    check_vectors("trellis_squares", scaled=(scaled, torch.int32), indices=(indices, torch.int32))
    check_vectors("trellis_squares", contexts=(contexts, torch.uint8))
    check_lengths("trellis_squares", scaled, indices)
    check_lengths("trellis_squares", scaled, contexts)
    check_table("trellis_squares", "offsets", offsets, (6,), -UNIT, UNIT)
    if stride < 1:
        raise ValueError(f"trellis_squares takes one block of every 1 or more, got {stride}")
    run = pick(_CPU, native.trellis_squares, reference_fit.trellis_squares)
    return run(scaled, indices, contexts, offsets, stride)


def trellis_tables(counts: Tensor) -> tuple[Tensor, str, float]:
    """The tables for counts (int64 [32, 4]) as `trellis_contexts` gives them.

    Levels (int8 [32, 3]), the digits that they are written in, and the bits of these and of the
    indices together.
    """
    if counts.dtype != torch.int64 or counts.shape != (2 * CLASSES, 4) or counts.device != _CPU:
        raise ValueError(f"trellis_tables takes int64 [32, 4], got {counts.dtype} {counts.shape}")
    if int(counts.min()) < 0:
        raise ValueError("trellis_tables: counts must not be negative")
    return pick(_CPU, native.trellis_tables, reference_tables.trellis_tables)(counts)


def trellis_encode(
    indices: Tensor, contexts: Tensor, halves: Tensor, tails: Tensor, segments: int
) -> tuple[Tensor, Tensor]:
    """The code of indices in their contexts (uint8) and the 16-bit words of each segment (int64).

    `halves` (int32 [32, 2]) are the frequencies of +1 and of +more, those of -1 and -more being
    the same and zero having the rest of 2^15; `tails` (int32 [32, 28]) add up to 2^12.
    """
    check_vectors(
        "trellis_encode", indices=(indices, torch.int32), contexts=(contexts, torch.uint8)
    )
    check_lengths("trellis_encode", indices, contexts)
    check_range("trellis_encode", indices, LARGEST)
    check_contexts("trellis_encode", contexts)
    _check_frequencies("trellis_encode", halves, tails)
    _check_segments("trellis_encode", segments, indices.numel())
    run = pick(_CPU, native.trellis_encode, reference.trellis_encode)
    return run(indices, contexts, halves, tails, segments)


def trellis_decode(
    packed: Tensor,
    lengths: Tensor,
    halves: Tensor,
    tails: Tensor,
    offsets: Tensor,
    shapes: Tensor,
    count: int,
    signed: bool = False,
    plane: Tensor | None = None,
) -> Tensor:
    """The values (int32, in 1/64 of a step) in a code; ValueError for bytes that are none.

    `plane` names the quantisers, if the trellis does not: packed bits, see reference/plane.py.
    """
    check_vectors("trellis_decode", packed=(packed, torch.uint8), lengths=(lengths, torch.int64))
    check_shapes("trellis_decode", shapes, lengths.numel(), count)
    _check_frequencies("trellis_decode", halves, tails)
    check_table("trellis_decode", "offsets", offsets, (6,), -UNIT, UNIT)
    if int(lengths.min()) < 2 or 2 * int(lengths.sum()) != packed.numel():
        raise ValueError(
            f"trellis_decode: segments of {lengths.tolist()[:8]} words in {packed.numel()} bytes"
        )
    if plane is not None:
        check_packed("trellis_decode", plane, count)
    run = pick(_CPU, native.trellis_decode, reference.trellis_decode)
    return run(packed, lengths, halves, tails, offsets, shapes, count, signed, plane)


def check_vectors(operation: str, **tensors: tuple[Tensor, torch.dtype]) -> None:
    for name, (tensor, dtype) in tensors.items():
        if tensor.dtype != dtype or tensor.dim() != 1 or tensor.device != _CPU:
            raise ValueError(
                f"{operation} takes {name} as a vector of {dtype} on the CPU, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )


def check_lengths(operation: str, a: Tensor, b: Tensor) -> None:
    if a.numel() != b.numel():
        raise ValueError(f"{operation} takes vectors of one length: {a.numel()}, {b.numel()}")


def check_contexts(operation: str, contexts: Tensor) -> None:
    if contexts.numel() and value_range(contexts)[1] >= 2 * CLASSES:
        raise ValueError(f"{operation}: contexts must lie below {2 * CLASSES}")


def check_range(operation: str, x: Tensor, most: int) -> None:
    if x.numel():
        low, high = value_range(x)
        if low < -most or high > most:
            raise ValueError(f"{operation}: {low} .. {high} must lie within {most}")


def value_range(x: Tensor) -> tuple[int, int]:
    """The least and the largest of int32, or of uint8: not worth torch's threads in a sample."""
    return pick(_CPU, native.trellis_range, reference_fit.trellis_range)(x)


def check_table(
    operation: str,
    name: str,
    table: Tensor,
    shape: tuple[int, ...],
    low: int,
    high: int,
    dtype: torch.dtype = torch.int32,
) -> None:
    if table.dtype != dtype or table.shape != shape or table.device != _CPU:
        raise ValueError(f"{operation} takes {name} as {dtype} {list(shape)}, got {table.shape}")
    if int(table.min()) < low or int(table.max()) > high:
        raise ValueError(f"{operation}: {name} must lie in {low} .. {high}")


def _check_frequencies(operation: str, halves: Tensor, tails: Tensor) -> None:
    check_table(operation, "halves", halves, (2 * CLASSES, 2), 1, 1 << PRECISION)
    check_table(operation, "tails", tails, (2 * CLASSES, TOKENS), 1, 1 << TAIL_PRECISION)
    if int(halves.sum(dim=1).max()) >= 1 << (PRECISION - 1):
        raise ValueError(f"{operation}: halves leave nothing to zero")
    if not bool((tails.sum(dim=1) == 1 << TAIL_PRECISION).all()):
        raise ValueError(f"{operation}: tails must add up to {1 << TAIL_PRECISION}")


def check_shapes(operation: str, shapes: Tensor, segments: int, count: int) -> None:
    if shapes.dtype != torch.int64 or shapes.dim() != 2 or shapes.shape[1] != 2:
        raise ValueError(f"{operation} takes shapes as int64 [tensors, 2], got {shapes.shape}")
    own = shapes.tolist()
    if not own or min(map(min, own)) < 1 or sum(rows * width for rows, width in own) != count:
        raise ValueError(f"{operation}: shapes {own[:8]} for {count} elements")
    _check_segments(operation, segments, count)


def _check_segments(operation: str, segments: int, count: int) -> None:
    if not count or not 1 <= segments <= max(1, count // BLOCK):
        raise ValueError(
            f"{operation}: {segments} segments of {count} elements, must have {BLOCK} or more each"
        )
