"""Symbols of which one is far more frequent than the rest: where the others are, and which.

Golomb 1966, "Run-length encodings": the runs of the frequent symbol between two others are
geometric if symbols are independent, and `coding.indices` codes such runs, or sends a bitmap if
that is shorter. The frequent symbol is the message's own most frequent one (of several the
smallest), so a quantiser need not put its zero first.

    the frequent symbol; the number of others; the others at fixed width in an alphabet smaller
    by one; their positions
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import (
    Coded,
    StreamReader,
    most_frequent,
    read_symbols,
    write_number,
    write_symbols,
)
from gradwire.coding.indices import decode_indices, encode_indices
from gradwire.core.symbols import pack_symbols, packed_bytes, unpack_symbols


def encode_golomb(symbols: Tensor, alphabet: int) -> Tensor:
    """Symbols 0 .. alphabet - 1 as uint8, at most one byte more than at fixed width."""
    return write_symbols(symbols, alphabet, lambda symbols: _encode(symbols, alphabet))


def decode_golomb(packed: Tensor, count: int, alphabet: int) -> Tensor:
    """The inverse of `encode_golomb`, as int32 [count]; other bytes are a WireError."""
    return read_symbols(packed, count, alphabet, lambda reader: _decode(reader, count, alphabet))


def _encode(symbols: Tensor, alphabet: int) -> Coded:
    count = symbols.numel()
    counts = kernels.count_symbols(symbols, alphabet)
    modal = most_frequent(counts)
    num_others = count - int(counts[modal])
    if alphabet > 2 and packed_bytes(num_others, alphabet - 1) >= packed_bytes(count, alphabet):
        return None
    positions, others = kernels.find_others(symbols, modal, num_others)
    parts = [encode_indices(positions, count)]
    if alphabet > 2:
        parts.insert(0, pack_symbols(others, alphabet - 1))
    return write_number(modal, alphabet - 1) + write_number(num_others, count - 1), parts


def _decode(reader: StreamReader, count: int, alphabet: int) -> Tensor:
    modal = reader.read_number(alphabet - 1, "the frequent symbol")
    num_others = reader.read_number(count - 1, "the number of other symbols")
    if alphabet > 2:
        packed = reader.take(packed_bytes(num_others, alphabet - 1), "other symbols")
        others = unpack_symbols(packed, num_others, alphabet - 1)
    else:
        others = torch.zeros(num_others, dtype=torch.int32, device=reader.rest.device)
    positions = decode_indices(reader.take(reader.rest.numel(), "positions"), count, num_others)
    symbols = torch.full((count,), modal, dtype=torch.int32, device=others.device)
    return symbols.scatter_(0, positions, others + (others >= modal).to(torch.int32))
