"""Elias' codes (Elias 1975) of positive integers, and of symbols by their distance from the most
frequent: see `kernels/reference/elias.py` for the order of the bits.

Symbols become integers as s -> 1 + zigzag(s - m) with m the message's most frequent symbol (of
several the smallest), zigzag(0, -1, 1, -2, 2, ...) = 0, 1, 2, 3, 4, ...

    the frequent symbol; the integers
"""

from typing import Literal

from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import (
    Coded,
    StreamReader,
    call_kernel,
    most_frequent,
    read_symbols,
    write_number,
    write_symbols,
)
from gradwire.core.symbols import packed_bytes

Code = Literal["gamma", "delta"]


def encode_elias(symbols: Tensor, alphabet: int, code: Code) -> Tensor:
    """Symbols 0 .. alphabet - 1 as uint8, at most one byte more than at fixed width."""

    def encode(symbols: Tensor) -> Coded:
        counts = kernels.count_symbols(symbols, alphabet)
        modal, delta = most_frequent(counts), code == "delta"
        lengths = kernels.elias_symbol_lengths(counts, modal)
        if sum(kernels.elias_sizes(lengths, delta)) >= packed_bytes(symbols.numel(), alphabet):
            return None
        coded = kernels.elias_encode(symbols, lengths, delta, centre=modal)
        return write_number(modal, alphabet - 1), [coded]

    return write_symbols(symbols, alphabet, encode)


def decode_elias(packed: Tensor, count: int, alphabet: int, code: Code) -> Tensor:
    """The inverse of `encode_elias`, as int32 [count]; other bytes are a WireError."""

    def decode(reader: StreamReader) -> Tensor:
        modal = reader.read_number(alphabet - 1, "the frequent symbol")
        symbols, used = kernels.elias_decode_symbols(
            reader.rest, count, alphabet, modal, code == "delta"
        )
        reader.take(used, "an Elias code")
        return symbols

    return read_symbols(packed, count, alphabet, decode)


def integers_bytes(values: Tensor, code: Code) -> int:
    """The length of `encode_integers`, without encoding."""
    return sum(kernels.elias_sizes(kernels.elias_lengths(values), code == "delta"))


def encode_integers(values: Tensor, code: Code) -> Tensor:
    """Integers from 1 on (int64 [n]) as uint8."""
    return kernels.elias_encode(values, kernels.elias_lengths(values), code == "delta")


def decode_integers(reader: StreamReader, count: int, largest: int, code: Code) -> Tensor:
    """Takes `count` integers in 1 .. largest (int64) off a received stream."""
    values, used = call_kernel(kernels.elias_decode, reader.rest, count, largest, code == "delta")
    reader.take(used, "an Elias code")
    decoded: Tensor = values
    return decoded
