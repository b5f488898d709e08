"""Elias' codes of positive integers, and of symbols by their distance from a centre."""

import torch
from torch import Tensor

from gradwire.kernels._checks import check_count
from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import elias as native
from gradwire.kernels.reference import elias as reference

triton = InTriton("elias")

_LARGEST = 2**56 - 1  # a codeword's low bits and a byte's offset fit into 64


def elias_lengths(values: Tensor) -> list[int]:
    """How many of these integers (int64 [n], 1 .. 2^56 - 1) have 1, 2, .. 64 bits."""
    if values.dtype != torch.int64:
        raise ValueError(f"elias_lengths takes int64, got {values.dtype}")
    run = pick(values.device, native.elias_lengths, reference.elias_lengths, triton.elias_lengths)
    return run(values.reshape(-1))


def elias_symbol_lengths(counts: Tensor, centre: int) -> list[int]:
    """The same of 1 + zigzag(s - centre), `counts[s]` (int64 [alphabet]) times for each symbol."""
    # Not by Triton: counts are as few as the alphabet has symbols.
    run = pick(counts.device, native.elias_symbol_lengths, reference.elias_symbol_lengths)
    return run(counts.reshape(-1), centre)


def elias_sizes(lengths: list[int], delta: bool) -> tuple[int, int, int]:
    """The bytes of each of the three streams of integers of these lengths."""
    return reference.elias_sizes(lengths, delta)


def elias_encode(
    values: Tensor, lengths: list[int], delta: bool, centre: int | None = None
) -> Tensor:
    """Integers (int64 [n]) of these lengths as uint8, or symbols of any integer type if there is
    a centre."""
    if values.dtype != torch.int64 and centre is None:
        raise ValueError(f"elias_encode takes int64, got {values.dtype}")
    run = pick(values.device, native.elias_encode, reference.elias_encode, triton.elias_encode)
    return run(values.reshape(-1), lengths, delta, centre)


def elias_decode(packed: Tensor, count: int, largest: int, delta: bool) -> tuple[Tensor, int]:
    """Integers 1 .. largest (int64 [count]) from the front of a stream, and their bytes.

    Other bytes are a ValueError.
    """
    _check("elias_decode", packed, count, largest)
    run = pick(packed.device, native.elias_decode, reference.elias_decode, triton.elias_decode)
    return run(packed, count, largest, delta)


def elias_decode_symbols(
    packed: Tensor, count: int, alphabet: int, centre: int, delta: bool
) -> tuple[Tensor, int]:
    """Symbols 0 .. alphabet - 1 (int32 [count]) from the front of a stream, and their bytes."""
    _check("elias_decode_symbols", packed, count, 2 * alphabet)
    run = pick(
        packed.device,
        native.elias_decode_symbols,
        reference.elias_decode_symbols,
        triton.elias_decode_symbols,
    )
    return run(packed, count, alphabet, centre, delta)


def _check(operation: str, packed: Tensor, count: int, largest: int) -> None:
    check_count(operation, "count", count)
    if not 1 <= largest <= _LARGEST:
        raise ValueError(f"{operation} takes integers up to 2^56 - 1, not {largest}")
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ValueError(f"{operation} takes uint8 [size], got {packed.dtype}")
