"""Trellis-coded quantisation in C: the numbers and bytes of reference/trellis.py, exactly."""

from functools import cache

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, load, parallel, pointer
from gradwire.kernels.reference.trellis import CLASSES, UNIT, invalid_code_error, segment_starts
from gradwire.kernels.reference.trellis_fit import (
    LAMBDA,
    OFFSET_BITS,
    Fit,
    symbol_bits,
    tail_bits,
)
from gradwire.kernels.reference.trellis_tables import LEVEL, event_bits

_CPU = torch.device("cpu")
_MOST_TEXT = 2 + 8 + 6 * CLASSES * 15  # digits of tables


def trellis_scale(x: Tensor, factor: float, most: int) -> Tensor:
    x = dense(x)
    scaled = empty(x.numel(), torch.int32)
    is_double = x.dtype == torch.float64
    parallel().gw_trellis_scale(
        x.data_ptr(), x.numel(), int(is_double), factor, most, scaled.data_ptr()
    )
    return scaled


def trellis_range(x: Tensor) -> tuple[int, int]:
    x = dense(x)
    found = torch.empty(2, dtype=torch.int64, device=_CPU)
    given = (x.data_ptr(), None) if x.dtype == torch.int32 else (None, x.data_ptr())
    parallel().gw_trellis_range(*given, x.numel(), found.data_ptr())
    low, high = found.tolist()
    return low, high


def trellis_squares(
    scaled: Tensor, indices: Tensor, contexts: Tensor, offsets: Tensor, stride: int
) -> tuple[float, float]:
    scaled, indices, contexts, offsets = map(dense, (scaled, indices, contexts, offsets))
    found = torch.empty(2, dtype=torch.float64, device=_CPU)
    load().gw_trellis_squares(
        scaled.data_ptr(),
        indices.data_ptr(),
        contexts.data_ptr(),
        scaled.numel(),
        stride,
        offsets.data_ptr(),
        found.data_ptr(),
    )
    error, energy = found.tolist()
    return error, energy


def trellis_search(
    scaled: Tensor, contexts: Tensor, rates: Tensor, offsets: Tensor, signed: bool = False
) -> Tensor:
    scaled, contexts, rates, offsets = map(dense, (scaled, contexts, rates, offsets))
    indices = empty(scaled.numel(), torch.int32)
    status = parallel().gw_trellis_search(
        scaled.data_ptr(),
        contexts.data_ptr(),
        scaled.numel(),
        rates.data_ptr(),
        offsets.data_ptr(),
        int(signed),
        indices.data_ptr(),
    )
    if status:
        raise MemoryError("trellis_search")
    return indices


def trellis_contexts(
    scaled: Tensor, indices: Tensor | None, shapes: Tensor, segments: int, signed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    scaled, shapes = dense(scaled), dense(shapes)
    indices = None if indices is None else dense(indices)
    contexts = empty(scaled.numel(), torch.uint8)
    counts = torch.zeros(segments, 2 * CLASSES, 4, dtype=torch.int64, device=_CPU)
    errors = torch.zeros(segments, 6, 2, dtype=torch.int64, device=_CPU)
    status = parallel().gw_trellis_contexts(
        scaled.data_ptr(),
        pointer(indices),
        scaled.numel(),
        shapes.data_ptr(),
        most_columns(shapes),
        segments,
        int(signed),
        contexts.data_ptr(),
        counts.data_ptr(),
        errors.data_ptr(),
    )
    if status:
        raise MemoryError("trellis_contexts")
    return contexts, counts.sum(dim=0), errors.sum(dim=0)


def trellis_counts(
    scaled: Tensor, indices: Tensor, contexts: Tensor, signed: bool = False
) -> tuple[Tensor, Tensor]:
    scaled, indices, contexts = map(dense, (scaled, indices, contexts))
    counts = torch.zeros(2 * CLASSES, 4, dtype=torch.int64, device=_CPU)
    errors = torch.zeros(6, 2, dtype=torch.int64, device=_CPU)
    load().gw_trellis_counts(
        scaled.data_ptr(),
        indices.data_ptr(),
        contexts.data_ptr(),
        scaled.numel(),
        int(signed),
        counts.data_ptr(),
        errors.data_ptr(),
    )
    return counts, errors


def trellis_tables(counts: Tensor) -> tuple[Tensor, str, float]:
    counts = dense(counts)
    levels = torch.empty(2 * CLASSES, 3, dtype=torch.int8, device=_CPU)
    text = torch.empty(_MOST_TEXT, dtype=torch.uint8, device=_CPU)
    size = torch.empty(1, dtype=torch.float64, device=_CPU)
    length = load().gw_trellis_tables(
        counts.data_ptr(),
        _event_bits().data_ptr(),
        levels.data_ptr(),
        text.data_ptr(),
        size.data_ptr(),
    )
    return levels, _digits(text, length), float(size)


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
) -> Fit:
    scaled, shapes = dense(scaled), dense(shapes)
    count = scaled.numel()
    is_given = levels is not None
    found = (
        torch.zeros(2 * CLASSES, 3, dtype=torch.int8, device="cpu")
        if levels is None
        else levels.clone()
    )
    moved = offsets.clone()
    indices = empty(count, torch.int32)
    contexts = empty(count, torch.uint8)
    text = torch.empty(_MOST_TEXT, dtype=torch.uint8, device=_CPU)
    numbers = torch.empty(3, dtype=torch.float64, device=_CPU)
    length = parallel().gw_trellis_fit(
        scaled.data_ptr(),
        count,
        shapes.data_ptr(),
        most_columns(shapes),
        segments,
        int(signed),
        int(is_given),
        rounds,
        passes,
        stride,
        _event_bits().data_ptr(),
        symbol_bits().data_ptr(),
        tail_bits().data_ptr(),
        LAMBDA * UNIT**2,
        OFFSET_BITS * (LAMBDA * UNIT**2),
        indices.data_ptr(),
        contexts.data_ptr(),
        found.data_ptr(),
        moved.data_ptr(),
        text.data_ptr(),
        numbers.data_ptr(),
    )
    if length < 0:
        raise MemoryError("trellis_fit")
    size, error, energy = numbers.tolist()
    return indices, contexts, found, moved, _digits(text, length), size, error, energy


def _digits(text: Tensor, length: int) -> str:
    return text[:length].numpy().tobytes().decode("ascii")


@cache
def _event_bits() -> Tensor:
    bits = [event_bits(level) for level in range(-LEVEL, LEVEL + 1)]
    return torch.tensor(bits, dtype=torch.float64, device=_CPU)


def trellis_encode(
    indices: Tensor, contexts: Tensor, halves: Tensor, tails: Tensor, segments: int
) -> tuple[Tensor, Tensor]:
    indices, contexts, halves, tails = map(dense, (indices, contexts, halves, tails))
    count = indices.numel()
    # Mostly untouched: a segment writes from the end of its part.
    words = torch.empty(3 * count + 2 * segments, dtype=torch.int16, device=_CPU)
    lengths = torch.empty(segments, dtype=torch.int64, device=_CPU)
    status = parallel().gw_trellis_encode(
        indices.data_ptr(),
        contexts.data_ptr(),
        count,
        segments,
        halves.data_ptr(),
        tails.data_ptr(),
        words.data_ptr(),
        lengths.data_ptr(),
    )
    if status:
        raise (
            MemoryError("trellis_encode")
            if status == -2
            else ValueError("trellis_encode: an index or a context out of range")
        )
    ends = segment_starts(count, segments)[1:]
    pieces = []
    for s, length in enumerate(lengths.tolist()):
        end = 3 * ends[s] + 2 * (s + 1)
        pieces.append(words[end - length : end])
    return torch.cat(pieces).view(torch.uint8), lengths


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
    packed, halves, tails, offsets, shapes = map(dense, (packed, halves, tails, offsets, shapes))
    starts = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=_CPU)
    torch.cumsum(lengths, 0, out=starts[1:])
    values = empty(count, torch.int32)
    status = parallel().gw_trellis_decode(
        packed.data_ptr(),
        starts.data_ptr(),
        count,
        lengths.numel(),
        shapes.data_ptr(),
        most_columns(shapes),
        halves.data_ptr(),
        tails.data_ptr(),
        offsets.data_ptr(),
        int(signed),
        pointer(plane if plane is None else dense(plane)),
        values.data_ptr(),
    )
    if status:
        raise MemoryError("trellis_decode") if status == -2 else invalid_code_error()
    return values


def most_columns(shapes: Tensor) -> int:
    """How many columns are remembered at once: one for a vector."""
    return max(1 if rows == 1 else width for rows, width in shapes.tolist())
