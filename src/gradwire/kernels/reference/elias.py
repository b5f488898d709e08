"""Elias' codes (Elias 1975), the bits of one kind from all codewords together.

An integer v of L + 1 bits is, in the gamma code, L zeros, a one, and the L bits below v's highest
(2L + 1 bits); in the delta code L + 1 is itself written in gamma. The codewords are his, their
order is ours: bits of one kind of all integers come one after another, so that both directions are
vector operations. Each stream is padded to a byte.

    gamma: the unary lengths; the low bits
    delta: the unary lengths of the lengths plus one; their low bits; the low bits of the integers
"""

from operator import mul

import torch
from torch import Tensor

from gradwire.kernels.reference.bits import ones_positions, pack_ones
from gradwire.kernels.reference.gaps import bit_lengths, expect_zero_padding

_MAX_BITS = 56
_LENGTHS_OF_LENGTHS = [(length + 1).bit_length() - 1 for length in range(64)]  # below the highest
_BIT_COUNTS = [byte.bit_count() for byte in range(256)]


def not_positive_error(values: Tensor) -> ValueError:
    low, high = int(values.min()), int(values.max())
    return ValueError(f"Elias' codes are of 1 .. 2^56 - 1, got values from {low} to {high}")


def lengths_error() -> ValueError:
    return ValueError("elias_encode: integers of other lengths than stated")


def elias_lengths(values: Tensor) -> list[int]:
    if values.numel() and (int(values.min()) < 1 or int(values.max()) >> _MAX_BITS):
        raise not_positive_error(values)
    return torch.bincount(bit_lengths(values), minlength=64).tolist()


def elias_symbol_lengths(counts: Tensor, centre: int) -> list[int]:
    symbols = torch.arange(counts.numel(), device=counts.device)
    of_symbol = bit_lengths(_to_integers(symbols, centre))
    return counts.new_zeros(64).index_add_(0, of_symbol, counts).tolist()


def elias_sizes(lengths: list[int], delta: bool) -> tuple[int, int, int]:
    count, low = sum(lengths), sum(map(mul, lengths, range(len(lengths))))
    middle = sum(map(mul, lengths, _LENGTHS_OF_LENGTHS)) if delta else 0
    unary = count + (middle if delta else low)
    return -(-unary // 8), -(-middle // 8), -(-low // 8)


def elias_encode(
    values: Tensor, lengths: list[int], delta: bool, centre: int | None = None
) -> Tensor:
    if centre is not None:
        values = _to_integers(values.to(torch.int64), centre)
    bits = bit_lengths(values)
    if torch.bincount(bits, minlength=64).tolist() != lengths:
        raise lengths_error()
    parts = [_gamma(bits + 1) if delta else _unary(bits), _low(values, bits)]
    return torch.cat(parts)


def elias_decode(packed: Tensor, count: int, largest: int, delta: bool) -> tuple[Tensor, int]:
    longest = largest.bit_length() - 1
    if delta:
        lengths, used = elias_decode(packed, count, longest + 1, delta=False)
        lengths -= 1
    else:
        lengths, used = _decode_unary(packed, count, longest)
    if count and int(lengths.max()) > longest:
        raise ValueError(f"an Elias code of {int(lengths.max()) + 1} bits, at most {longest + 1}")
    low, low_bytes = _decode_low(packed[used:], lengths)
    values = (torch.ones_like(lengths) << lengths) + low
    if count and int(values.max()) > largest:
        raise ValueError(f"{int(values.max())} in an Elias code, expected at most {largest}")
    return values, used + low_bytes


def elias_decode_symbols(
    packed: Tensor, count: int, alphabet: int, centre: int, delta: bool
) -> tuple[Tensor, int]:
    values, used = elias_decode(packed, count, 2 * alphabet, delta)
    zigzag = values - 1
    symbols = centre + torch.where(zigzag % 2 == 1, -(zigzag + 1) // 2, zigzag // 2)
    if bool(((symbols < 0) | (symbols >= alphabet)).any()):
        raise ValueError(f"a symbol beyond 0 .. {alphabet - 1} behind an Elias code")
    return symbols.to(torch.int32), used


def _to_integers(symbols: Tensor, centre: int) -> Tensor:
    distance = symbols - centre
    return torch.where(distance < 0, -2 * distance, 2 * distance + 1)


def _gamma(values: Tensor) -> Tensor:
    bits = bit_lengths(values)
    return torch.cat([_unary(bits), _low(values, bits)])


def _unary(lengths: Tensor) -> Tensor:
    """Each number as so many zeros and a one."""
    ones = torch.cumsum(lengths + 1, 0) - 1
    return pack_ones(ones, int(ones[-1]) + 1 if len(ones) else 0)


def _low(values: Tensor, lengths: Tensor) -> Tensor:
    """The lowest bits of each value, one after the other."""
    ends = torch.cumsum(lengths, 0)
    starts = ends - lengths
    num_bytes = -(-int(ends[-1]) // 8) if len(ends) else 0
    stream = torch.zeros(num_bytes + 8, dtype=torch.int32, device=values.device)
    aligned = (values - (torch.ones_like(values) << lengths)) << starts % 8
    for byte in range(8):
        part = (aligned >> 8 * byte & 0xFF).to(torch.int32)
        stream.index_add_(0, (starts >> 3) + byte, part)
    return stream[:num_bytes].to(torch.uint8)


def _decode_unary(packed: Tensor, count: int, largest: int) -> tuple[Tensor, int]:
    """Takes the bytes up to the one that holds the `count`-th one."""
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=packed.device), 0
    # Counting bits per byte first finds where they end without a position for each one.
    table = torch.tensor(_BIT_COUNTS, dtype=torch.uint8, device=packed.device)
    ahead = packed[: -(-count * (largest + 1) // 8)].to(torch.int32)
    seen = torch.cumsum(table[ahead], 0)
    if not seen.numel() or int(seen[-1]) < count:
        raise ValueError(f"fewer than {count} ones in the unary part of an Elias code")
    num_bytes = int(torch.searchsorted(seen, count)) + 1
    ones = ones_positions(packed[:num_bytes], 8 * num_bytes)
    if ones.numel() != count:
        raise ValueError(f"{ones.numel()} ones in the unary part of an Elias code, not {count}")
    return torch.diff(ones, prepend=ones.new_full((1,), -1)) - 1, num_bytes


def _decode_low(packed: Tensor, lengths: Tensor) -> tuple[Tensor, int]:
    ends = torch.cumsum(lengths, 0)
    starts = ends - lengths
    num_bits = int(ends[-1]) if len(ends) else 0
    num_bytes = -(-num_bits // 8)
    if num_bytes > packed.numel():
        raise ValueError(
            f"{packed.numel()} bytes are left for {num_bytes} bytes of an Elias code's low bits"
        )
    packed = packed[:num_bytes]
    expect_zero_padding(packed, num_bits)
    padded = torch.nn.functional.pad(packed, (0, 8)).to(torch.int64)
    low = torch.zeros_like(lengths)
    for byte in range(8):
        low |= padded[(starts >> 3) + byte] << 8 * byte
    return low >> starts % 8 & ((torch.ones_like(lengths) << lengths) - 1), num_bytes
