"""Payloads of entries, positions and values, of several vectors at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels._dispatch import cpu_backend
from gradwire.kernels._pool import empty
from gradwire.kernels.native import entries as native

_LARGEST_UNIVERSE = 2**61
_HEAD = 40  # bytes at most: a header, padding, and the gap behind a payload
_LEAD = 4


class EntryPart(NamedTuple):
    """Where a payload lies in the memory of all."""

    start: int
    nbytes: int
    index_nbytes: int  # of its positions, which come last
    gap: int  # bytes between this one and the next


def codes_entries(values: Tensor) -> bool:
    """Whether there is an `encode_entries` for these: of the CPU, by the C library. Without that,
    payloads are made one after another of their parts."""
    is_plain = values.device.type == "cpu" and values.dtype == torch.float32
    return is_plain and cpu_backend() == "native"


def encode_entries(
    positions: Tensor,
    values: Tensor,
    counts: Sequence[int],
    universe: int,
    front: int,
    lead: bytes,
    kinds: tuple[int, int],
    context: int,
    is_pinned: bool = False,
) -> tuple[Tensor, list[EntryPart]]:
    """Payloads of rows with `counts` positions and values each, which lie one after another.

    Positions (int64) increase strictly in 0 .. universe - 1 in every row; others are a ValueError.
    They are coded as `coding/indices.py` does it, with their number in `front` bytes before them.
    A payload starts with the four bytes of `lead`; `kinds` are the codes of the dtypes of positions
    and values in its header, and its checksum continues from `context`. `is_pinned`: in page-locked
    memory.
    """
    if positions.dtype != torch.int64 or values.dtype != torch.float32 or len(lead) != _LEAD:
        raise ValueError(
            f"encode_entries takes int64 positions, float32 values and 4 bytes in front, got "
            f"{positions.dtype}, {values.dtype} and {len(lead)}"
        )
    total = sum(counts)
    if positions.shape != (total,) or values.shape != (total,) or min(counts, default=0) < 0:
        raise ValueError(
            f"encode_entries takes {total} positions and values for its rows, got "
            f"{list(positions.shape)} and {list(values.shape)}"
        )
    if not 0 <= universe <= _LARGEST_UNIVERSE or not 0 <= front <= 8:
        raise ValueError(
            f"encode_entries takes a universe of 0 .. 2^61 elements and 0 .. 8 bytes for counts, "
            f"got {universe} and {front}"
        )
    room = sum(_HEAD + front + 4 * count + _most_code(count, universe) for count in counts)
    if is_pinned:
        out = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=True)
    else:
        out = empty(room, torch.uint8)
    written, layout = native.encode_entries(
        positions.contiguous(),
        values.contiguous(),
        counts,
        universe,
        front,
        lead,
        kinds,
        context,
        out,
    )
    if written < 0:
        assert written != -1, "there is room for the longest code"
        raise ValueError(
            f"encode_entries: positions of a row must increase strictly in 0 .. {universe - 1}"
        )
    parts = [EntryPart(*layout[at : at + 4]) for at in range(0, len(layout), 4)]
    return out[:written], parts


def _most_code(count: int, universe: int) -> int:
    """Bytes that positions take at most, with their mode."""
    # Rice's code at log2 of the mean gap takes at most 31 bits for low parts and 4 for a quotient,
    # unless the mean gap is beyond 2^32.
    return 2 + min(-(-universe // 8), 5 * count + (universe >> 33))
