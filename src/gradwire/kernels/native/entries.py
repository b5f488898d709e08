"""Payloads of entries of several vectors in C: the bytes of one after another."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from gradwire.kernels.native._library import load

_INTEGERS = ctypes.c_int64


def encode_entries(
    positions: Tensor,
    values: Tensor,
    counts: Sequence[int],
    universe: int,
    front: int,
    lead: bytes,
    kinds: tuple[int, int],
    context: int,
    out: Tensor,
) -> tuple[int, list[int]]:
    """The bytes that are written, negative if none are, and four numbers for each row."""
    rows = len(counts)
    steps, layout = (_INTEGERS * max(counts, default=0))(), (_INTEGERS * (4 * rows))()
    written: int = load().gw_encode_entries(
        positions.data_ptr(),
        values.data_ptr(),
        (_INTEGERS * rows)(*counts),
        rows,
        universe,
        front,
        int.from_bytes(lead, "little"),
        kinds[0] | kinds[1] << 8,
        context,
        steps,
        out.data_ptr(),
        out.numel(),
        layout,
    )
    return written, layout[:]
