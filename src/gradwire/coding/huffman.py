"""Canonical Huffman codes of symbols (Huffman 1952) of at most 15 bits: see
`kernels/reference/huffman.py` for the codewords and their chunks.

Of a message whose symbols are all equal only the table travels.

    the length of each symbol's codeword plus one, zero bits meaning that it does not occur, in
    Elias' gamma code; what is below the highest 12 bits of the symbols, if they have more, at
    fixed width; the chunk lengths and codewords
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import (
    Coded,
    StreamReader,
    join_low,
    read_symbols,
    split_low,
    table_size,
    take_low,
    write_symbols,
)
from gradwire.coding.elias import decode_integers, encode_integers
from gradwire.core.errors import WireError
from gradwire.core.symbols import packed_bytes

_LIMIT = 15  # bits of the longest codeword


def encode_huffman(symbols: Tensor, alphabet: int) -> Tensor:
    """Symbols 0 .. alphabet - 1 as uint8, at most one byte more than at fixed width."""
    return write_symbols(symbols, alphabet, lambda symbols: _encode(symbols, alphabet))


def decode_huffman(packed: Tensor, count: int, alphabet: int) -> Tensor:
    """The inverse of `encode_huffman`, as int32 [count]; other bytes are a WireError."""
    return read_symbols(packed, count, alphabet, lambda reader: _decode(reader, count, alphabet))


def _encode(symbols: Tensor, alphabet: int) -> Coded:
    high, low = split_low(symbols, alphabet)
    counts = kernels.count_symbols(high, table_size(alphabet)).cpu()
    lengths = kernels.huffman_lengths(counts)
    parts = [encode_integers(lengths + 1, "gamma"), *low]
    if int(counts.max()) < symbols.numel():
        num_bits = int((counts * lengths).sum())
        size = sum(map(Tensor.numel, parts)) + num_bits // 8
        if size >= packed_bytes(symbols.numel(), alphabet):
            return None
        parts.append(kernels.huffman_encode(high, lengths, num_bits))
    return b"", parts


def _decode(reader: StreamReader, count: int, alphabet: int) -> Tensor:
    lengths = decode_integers(reader, table_size(alphabet), _LIMIT + 1, "gamma") - 1
    low = take_low(reader, count, alphabet)
    present = torch.nonzero(lengths).reshape(-1)
    if present.numel() == 1:
        if int(lengths.sum()) != 1:
            raise WireError(f"a Huffman code of one symbol in {int(lengths.sum())} bits, not 1")
        return join_low(present.to(torch.int32).expand(count), low, alphabet)
    code = reader.take(reader.rest.numel(), "codewords")
    return join_low(kernels.huffman_decode(code, lengths, count), low, alphabet)
