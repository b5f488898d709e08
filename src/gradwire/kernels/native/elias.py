"""Elias' codes in C: the bytes and integers of reference/elias.py, exactly.

If C refuses its input, the reference finds the reason and raises the error.
"""

import ctypes

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, load
from gradwire.kernels.native.symbols import as_integers
from gradwire.kernels.reference import elias as reference

_CPU = torch.device("cpu")


def elias_lengths(values: Tensor) -> list[int]:
    values, lengths = dense(values), (ctypes.c_int64 * 64)()
    if load().gw_elias_lengths(values.data_ptr(), None, values.numel(), 0, lengths):
        raise reference.not_positive_error(values)
    return lengths[:]


def elias_symbol_lengths(counts: Tensor, centre: int) -> list[int]:
    counts, lengths = dense(counts.to(torch.int64)), (ctypes.c_int64 * 64)()
    load().gw_elias_lengths(None, counts.data_ptr(), counts.numel(), centre, lengths)
    return lengths[:]


def elias_encode(
    values: Tensor, lengths: list[int], delta: bool, centre: int | None = None
) -> Tensor:
    values = as_integers(values)
    sizes = reference.elias_sizes(lengths, delta)
    packed = torch.empty(sum(sizes), dtype=torch.uint8, device=_CPU)
    if load().gw_elias_encode(
        values.data_ptr(),
        0 if centre is None else values.element_size(),
        centre or 0,
        values.numel(),
        delta,
        (ctypes.c_int64 * 3)(*sizes),
        packed.data_ptr(),
    ):
        raise reference.lengths_error()
    return packed


def elias_decode(packed: Tensor, count: int, largest: int, delta: bool) -> tuple[Tensor, int]:
    packed = dense(packed)
    values = torch.empty(count, dtype=torch.int64, device=_CPU)
    used = _decode(packed, values, delta, largest, 0, 0) if count else -1
    return (values, used) if used >= 0 else reference.elias_decode(packed, count, largest, delta)


def elias_decode_symbols(
    packed: Tensor, count: int, alphabet: int, centre: int, delta: bool
) -> tuple[Tensor, int]:
    packed = dense(packed)
    symbols = torch.empty(count, dtype=torch.int32, device=_CPU)
    used = _decode(packed, symbols, delta, 2 * alphabet, centre, alphabet) if count else -1
    if used < 0:
        return reference.elias_decode_symbols(packed, count, alphabet, centre, delta)
    return symbols, used


def _decode(
    packed: Tensor, out: Tensor, delta: bool, largest: int, centre: int, alphabet: int
) -> int:
    used: int = load().gw_elias_decode(
        packed.data_ptr(),
        packed.numel(),
        out.numel(),
        delta,
        largest,
        centre,
        alphabet,
        out.data_ptr(),
    )
    return used
