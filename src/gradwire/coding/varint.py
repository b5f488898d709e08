"""Whole numbers, seven bits a byte: the eighth says that another follows.

For a few small numbers that a receiver cannot know, such as the lengths of the pieces of a part.
"""

from collections.abc import Iterable

from gradwire.core.errors import WireError


def write_varints(numbers: Iterable[int]) -> bytes:
    """Numbers of at least zero, one after the other, the low bits of each first."""
    out = bytearray()
    for number in numbers:
        assert number >= 0, f"a varint is not negative: {number}"
        while number >= 0x80:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


def read_varints(data: bytes, count: int, largest: int) -> tuple[list[int], bytes]:
    """`count` numbers of at most `largest` each, and what follows; `WireError` if they are not."""
    numbers: list[int] = []
    position = 0
    longest = -(-max(1, largest.bit_length()) // 7)
    for _ in range(count):
        number, used = 0, 0
        while True:
            if position == len(data) or used == longest:
                raise WireError(f"{len(data)} bytes hold no {count} numbers up to {largest}")
            byte = data[position]
            number |= (byte & 0x7F) << 7 * used
            position, used = position + 1, used + 1
            if byte < 0x80:
                break
        if number > largest:
            raise WireError(f"{number} where at most {largest} is possible")
        numbers.append(number)
    return numbers, data[position:]
