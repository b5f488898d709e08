"""Elias' codes of positive integers, and of symbols by their distance from the most frequent.

Elias 1975, "Universal codeword sets and representations of the integers". An integer v of L + 1
bits is, in the gamma code, L zeros, a one, and the L bits below v's highest (2L + 1 bits); in the
delta code L + 1 is itself written in gamma (L + 2 floor(log2(L + 1)) + 1 bits). The codewords are
his, their order is ours: all unary lengths come first as one bit stream, then the low bits of all
values of one length after another, so that both directions are vector operations. Each stream is
padded to a byte.

Symbols become integers as s -> 1 + zigzag(s - m) with m the message's most frequent symbol (of
several the smallest), zigzag(0, -1, 1, -2, 2, ...) = 0, 1, 2, 3, 4, ...
"""

from typing import Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding._stream import Reader, most_frequent, number, read, write
from gradwire.core.errors import WireError

Code = Literal["gamma", "delta"]
_CHUNK = 24  # bits of a low part that are packed at a time


def encode_elias(symbols: Tensor, alphabet: int, code: Code) -> Tensor:
    """Symbols 0 .. alphabet - 1 as uint8, at most one byte more than at fixed width."""

    def encode(symbols: Tensor) -> Tensor:
        modal = most_frequent(symbols)
        distance = symbols.to(torch.int64) - modal
        zigzag = torch.where(distance < 0, -2 * distance - 1, 2 * distance)
        return torch.cat([number(modal, alphabet - 1, symbols), encode_integers(zigzag + 1, code)])

    return write(symbols, alphabet, encode)


def decode_elias(packed: Tensor, count: int, alphabet: int, code: Code) -> Tensor:
    """The inverse of `encode_elias`, as int32 [count]; other bytes are a WireError."""

    def decode(reader: Reader) -> Tensor:
        modal = reader.number(alphabet - 1, "the frequent symbol")
        zigzag = decode_integers(reader, count, 2 * alphabet, code) - 1
        symbols = modal + torch.where(zigzag % 2 == 1, -(zigzag + 1) // 2, zigzag // 2)
        if bool(((symbols < 0) | (symbols >= alphabet)).any()):
            raise WireError(f"a symbol beyond 0 .. {alphabet - 1} behind an Elias code")
        return symbols

    return read(packed, count, alphabet, decode)


def integers_bytes(values: Tensor, code: Code) -> int:
    """The length of `encode_integers`, without encoding."""
    lengths = _lengths(values)
    total = integers_bytes(lengths + 1, "gamma") if code == "delta" else _unary_bytes(lengths)
    return total + sum(
        _ceil8(width * count) for length, count in _classes(lengths) for _, width in _chunks(length)
    )


def encode_integers(values: Tensor, code: Code) -> Tensor:
    """Integers from 1 on (int64 [n], n >= 1) as uint8."""
    lengths = _lengths(values)
    parts = [encode_integers(lengths + 1, "gamma") if code == "delta" else _encode_unary(lengths)]
    for length, _ in _classes(lengths):
        low = values[lengths == length] - (1 << length)
        for start, width in _chunks(length):
            parts.append(kernels.pack_uints((low >> start) & ((1 << width) - 1), width))
    return torch.cat(parts)


def decode_integers(reader: Reader, count: int, largest: int, code: Code) -> Tensor:
    """Takes `count` integers in 1 .. largest (int64) off a received stream."""
    longest = largest.bit_length() - 1
    if code == "delta":
        lengths = decode_integers(reader, count, longest + 1, "gamma") - 1
    else:
        lengths = _decode_unary(reader, count, longest)
    if int(lengths.max()) > longest:
        raise WireError(f"an Elias code of {int(lengths.max()) + 1} bits, at most {longest + 1}")
    values = torch.ones_like(lengths) << lengths
    for length, members in _classes(lengths):
        low = torch.zeros(members, dtype=torch.int64, device=lengths.device)
        for start, width in _chunks(length):
            packed = reader.take(_ceil8(width * members), "an Elias code's low bits")
            expect_zero_padding(packed, width * members)
            low |= kernels.unpack_uints(packed, width, members).to(torch.int64) << start
        values[lengths == length] += low
    if int(values.max()) > largest:
        raise WireError(f"{int(values.max())} in an Elias code, expected at most {largest}")
    return values


def expect_zero_padding(packed: Tensor, num_bits: int) -> None:
    """Refuses bytes that nobody sends: with ones behind the last of `num_bits` bits."""
    if num_bits % 8 and int(packed[-1]) >> num_bits % 8:
        raise WireError(
            f"a stream of bits ends in byte {int(packed[-1])}, expected zeros after "
            f"its first {num_bits % 8} bits"
        )


def _encode_unary(lengths: Tensor) -> Tensor:
    """Each number as so many zeros and a one."""
    ones = torch.cumsum(lengths + 1, 0) - 1
    return kernels.pack_ones(ones, int(ones[-1]) + 1)


def _decode_unary(reader: Reader, count: int, largest: int) -> Tensor:
    """Takes the bytes up to the one that holds the `count`-th one."""
    # Counting bits per byte first finds where they end without a position for each one.
    table = torch.tensor([byte.bit_count() for byte in range(256)], dtype=torch.uint8)
    ahead = reader.rest[: _ceil8(count * (largest + 1))].to(torch.int32)
    seen = torch.cumsum(table.to(ahead.device)[ahead], 0)
    if not seen.numel() or int(seen[-1]) < count:
        raise WireError(f"fewer than {count} ones in the unary part of an Elias code")
    num_bytes = int(torch.searchsorted(seen, count)) + 1
    ones = kernels.ones_positions(reader.take(num_bytes, "unary lengths"), 8 * num_bytes)
    if ones.numel() != count:
        raise WireError(f"{ones.numel()} ones in the unary part of an Elias code, not {count}")
    return torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1


def _lengths(values: Tensor) -> Tensor:
    """floor(log2 v), exact below 2^53."""
    return (torch.frexp(values.to(torch.float64)).exponent - 1).to(torch.int64)


def _classes(lengths: Tensor) -> list[tuple[int, int]]:
    """The lengths above zero that occur, and how often."""
    counts = torch.bincount(lengths).tolist()
    return [(length, count) for length, count in enumerate(counts) if length and count]


def _chunks(length: int) -> list[tuple[int, int]]:
    """The first bit and the width of each of the pieces in which low parts are packed."""
    return [(start, min(_CHUNK, length - start)) for start in range(0, length, _CHUNK)]


def _unary_bytes(lengths: Tensor) -> int:
    return _ceil8(int(lengths.sum()) + lengths.numel())


def _ceil8(num_bits: int) -> int:
    return -(-num_bits // 8)
