"""Quantisers selected by a plane of bits, on the CPU; reference/plane.py specifies them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels._checks import check_packed
from gradwire.kernels._dispatch import pick
from gradwire.kernels._polar import check_rows
from gradwire.kernels._trellis import (
    MOST_SCALED,
    check_contexts,
    check_lengths,
    check_range,
    check_shapes,
    check_table,
    check_vectors,
    value_range,
)
from gradwire.kernels.native import plane as native
from gradwire.kernels.reference import plane as reference
from gradwire.kernels.reference.plane import Piece
from gradwire.kernels.reference.polar import FREE, MIXED
from gradwire.kernels.reference.trellis import CLASSES, UNIT

_CPU = torch.device("cpu")


def plane_ratios(scaled: Tensor, contexts: Tensor, rates: Tensor, offsets: Tensor) -> Tensor:
    """How much each number (int32, in 1/64 of a step) prefers quantiser 0, int8.

    Contexts, rates and offsets are as for `trellis_search`; 32 units are a squared step.
    """
    _check("plane_ratios", scaled, rates, offsets)
    check_vectors("plane_ratios", contexts=(contexts, torch.uint8))
    check_lengths("plane_ratios", scaled, contexts)
    check_contexts("plane_ratios", contexts)
    run = pick(_CPU, native.plane_ratios, reference.plane_ratios)
    return run(scaled, contexts, rates, offsets)


def plane_words(pieces: Sequence[Piece]) -> list[tuple[Tensor, Tensor]]:
    """The words of polar codes nearest to the ratios of each piece of a plane, as packed bits.

    Of each piece the inputs of the code, uint8 [n, lanes / 8], and the word, a bit for each ratio;
    see `polar_quantise`, which it is with ties and the minimum corrected.
    """
    for ratios, kinds, order in pieces:
        check_rows("plane_words", ratios.unsqueeze(0), torch.int8)
        if len(ratios) < 8:  # which make whole words of bits
            raise ValueError(f"plane_words takes pieces of 8 positions or more, got {len(ratios)}")
        _check_kinds(kinds, len(ratios))
        if order.dtype != torch.int64 or order.shape != (len(ratios),):
            raise ValueError(
                f"plane_words takes an order of int64 [{len(ratios)}], got {order.dtype} "
                f"{list(order.shape)}"
            )
    return pick(_CPU, native.plane_words, reference.plane_words)(pieces)


def _check_kinds(kinds: Tensor, n: int) -> None:
    if kinds.dtype != torch.uint8 or kinds.shape != (2 * n,):
        raise ValueError(
            f"plane_words takes uint8 [{2 * n}] for kinds, got {kinds.dtype} {list(kinds.shape)}"
        )
    if value_range(kinds)[1] > MIXED or value_range(kinds[n:])[1] > FREE:
        raise ValueError("plane_words: kinds are those that polar_kinds makes, got others")


def plane_choose(
    scaled: Tensor, plane: Tensor, rates: Tensor, offsets: Tensor, shapes: Tensor, segments: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices (int32) of least cost in the quantisers that a plane (packed bits) names.

    And their contexts, counts and errors, as from `trellis_contexts`.
    """
    _check("plane_choose", scaled, rates, offsets)
    check_shapes("plane_choose", shapes, segments, scaled.numel())
    check_packed("plane_choose", plane, scaled.numel())
    run = pick(_CPU, native.plane_choose, reference.plane_choose)
    return run(scaled, plane, rates, offsets, shapes, segments)


def _check(operation: str, scaled: Tensor, rates: Tensor, offsets: Tensor) -> None:
    check_vectors(operation, scaled=(scaled, torch.int32))
    check_range(operation, scaled, MOST_SCALED)
    check_table(operation, "rates", rates, (8, CLASSES), 0, 1 << 17)
    check_table(operation, "offsets", offsets, (6,), -UNIT, UNIT)
