"""Symbols of a small alphabet, packed without an entropy coder.

At fixed width a symbol takes ceil(log2 m) bits. Where several fit into a byte as digits of base m
with fewer bits each, they do: five trits, or three of base 5 or 6.
"""

from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import WireError


def symbol_bits(alphabet: int) -> int:
    """Bits of one symbol at fixed width."""
    return max(1, (alphabet - 1).bit_length())


def digits_per_byte(alphabet: int) -> int:
    """How many symbols share a byte as digits; 0 where fixed width takes no more."""
    count = {3: 5, 5: 3, 6: 3}.get(alphabet, 0)
    assert count == 0 or alphabet**count <= 256
    return count


def packed_bytes(count: int, alphabet: int) -> int:
    """Length of `count` packed symbols."""
    digits = digits_per_byte(alphabet)
    return -(-count // digits) if digits else -(-count * symbol_bits(alphabet) // 8)


def pack_symbols(symbols: Tensor, alphabet: int) -> Tensor:
    """Symbols 0 .. alphabet - 1 as uint8 [packed_bytes]."""
    digits = digits_per_byte(alphabet)
    if digits:
        return kernels.pack_digits(symbols, alphabet, digits)
    return kernels.pack_uints(symbols, symbol_bits(alphabet))


def unpack_symbols(packed: Tensor, count: int, alphabet: int) -> Tensor:
    """The symbols in received bytes, as integers; `WireError` if one is out of the alphabet."""
    digits = digits_per_byte(alphabet)
    if digits:
        if packed.numel() and int(packed.max()) >= alphabet**digits:
            raise WireError(f"byte {int(packed.max())}, expected 0 .. {alphabet**digits - 1}")
        return kernels.unpack_digits(packed, alphabet, digits, count)
    bits = symbol_bits(alphabet)
    symbols = kernels.unpack_uints(packed, bits, count)
    if alphabet != 1 << bits and symbols.numel():
        largest = int(symbols.max())
        if largest >= alphabet:
            raise WireError(f"symbol {largest}, expected 0 .. {alphabet - 1}")
    return symbols
