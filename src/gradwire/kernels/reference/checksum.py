"""CRC-32, with zlib's polynomial, and arithmetic on its values.

Values are polynomials over GF(2) modulo that of CRC-32; bit 31 of a word is the lowest power.
"""

import zlib
from functools import lru_cache
from typing import Any

from torch import Tensor

POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_ORDER = (1 << 32) - 1  # x to this power is one: the polynomial is primitive


def crc32(x: Tensor, start: int, crc: int, head: int) -> tuple[int, bytes]:
    """The checksum of the bytes from `start` on, continued from `crc`, and the first bytes."""
    data: Any = x.cpu().numpy()
    return zlib.crc32(data[start:], crc), data[:head].tobytes()


def times(a: int, b: int) -> int:
    """The product of two polynomials."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & _ORDER
        b = b >> 1 ^ POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=1024)
def power_of_x(exponent: int) -> int:
    """x^exponent, which may be negative."""
    exponent %= _ORDER
    power, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            power = times(power, square)
        square = times(square, square)
        exponent >>= 1
    return power
