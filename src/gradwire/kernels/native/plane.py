"""Quantisers selected by a plane of bits, in C: the numbers of reference/plane.py, exactly."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, parallel
from gradwire.kernels.native.trellis import most_columns
from gradwire.kernels.reference.plane import Piece
from gradwire.kernels.reference.trellis import CLASSES

_CPU = torch.device("cpu")


def plane_ratios(scaled: Tensor, contexts: Tensor, rates: Tensor, offsets: Tensor) -> Tensor:
    scaled, contexts, rates, offsets = map(dense, (scaled, contexts, rates, offsets))
    ratios = empty(scaled.numel(), torch.int8)
    parallel().gw_plane_ratios(
        scaled.data_ptr(),
        contexts.data_ptr(),
        scaled.numel(),
        rates.data_ptr(),
        offsets.data_ptr(),
        ratios.data_ptr(),
    )
    return ratios


def plane_words(pieces: Sequence[Piece]) -> list[tuple[Tensor, Tensor]]:
    kept, numbers, found = [], [], []
    for ratios, kinds, order in pieces:
        n, lanes = ratios.shape
        given = [dense(ratios), dense(kinds), dense(order)]
        own = [torch.empty(n, lanes // 8, dtype=torch.uint8, device=_CPU) for _ in range(2)]
        kept.append(given)
        found.append((own[0], own[1]))
        numbers.append([*(x.data_ptr() for x in (*given, *own)), n, lanes])
    table = torch.tensor(numbers, dtype=torch.int64, device=_CPU)
    if parallel().gw_plane_words(table.data_ptr(), len(numbers)):
        raise MemoryError("plane_words")
    return found


def plane_choose(
    scaled: Tensor, plane: Tensor, rates: Tensor, offsets: Tensor, shapes: Tensor, segments: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scaled, plane, rates, offsets, shapes = map(dense, (scaled, plane, rates, offsets, shapes))
    count = scaled.numel()
    indices = empty(count, torch.int32)
    contexts = empty(count, torch.uint8)
    counts = torch.zeros(segments, 2 * CLASSES, 4, dtype=torch.int64, device=_CPU)
    errors = torch.zeros(segments, 6, 2, dtype=torch.int64, device=_CPU)
    status = parallel().gw_plane_choose(
        scaled.data_ptr(),
        plane.data_ptr(),
        count,
        rates.data_ptr(),
        offsets.data_ptr(),
        shapes.data_ptr(),
        most_columns(shapes),
        segments,
        indices.data_ptr(),
        contexts.data_ptr(),
        counts.data_ptr(),
        errors.data_ptr(),
    )
    if status:
        raise MemoryError("plane_choose")
    return indices, contexts, counts.sum(dim=0), errors.sum(dim=0)
