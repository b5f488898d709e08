"""Numbers and texts as bytes: the primitives of payloads, header objects and messages.

    varint    seven bits a byte, low bits first; the eighth bit says that another byte follows
    signed    the varint of 2x, or of -2x - 1 below zero; |x| up to 64 bits
    f64       eight bytes, little-endian
    chunk     its length as a varint, then its bytes; a text is a chunk of UTF-8

A `ByteReader` trusts nothing. It checks a length before it takes or allocates anything, and each
number has one accepted encoding. Whatever is wrong is a `WireError`.
"""

import struct
from collections.abc import Iterable

from gradwire.core.errors import WireError

_MAX_VARINT_NBYTES = 10
_LARGEST_VARINT = (1 << 7 * _MAX_VARINT_NBYTES) - 1
_F64 = struct.Struct("<d")


class ByteReader:
    """Reads bytes from front to end. `what` names them in errors."""

    __slots__ = ("data", "position", "what")

    def __init__(self, data: bytes, what: str) -> None:
        self.data, self.what = data, what
        self.position = 0

    @property
    def num_left(self) -> int:
        return len(self.data) - self.position

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.num_left:
            raise WireError(
                f"{self.what} is cut off: it ends {nbytes - self.num_left} bytes too early"
            )
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def byte(self) -> int:
        position = self.position
        if position == len(self.data):
            self.take(1)  # raises
        self.position = position + 1
        return self.data[position]

    def choice(self, count: int, what: object) -> int:
        """The number of one of `count` alternatives."""
        number = self.byte()
        if number >= count:
            raise WireError(f"{what} has {count} choices, got number {number}")
        return number

    def varint(self, largest: int = _LARGEST_VARINT) -> int:
        value = 0
        for index in range(_MAX_VARINT_NBYTES):
            byte = self.byte()
            value |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                if index and not byte:
                    raise WireError("a varint with more bytes than it needs")
                if value > largest:
                    raise WireError(f"{value} in {self.what}, where at most {largest} is possible")
                return value
        raise WireError(f"a varint of more than {_MAX_VARINT_NBYTES} bytes")

    def signed(self) -> int:
        value = self.varint()
        if value >> 65:
            raise WireError(f"an integer of more than 64 bits: {value:#x}")
        return -(value >> 1) - 1 if value & 1 else value >> 1

    def f64(self) -> float:
        value: float = _F64.unpack(self.take(8))[0]
        return value

    def chunk(self) -> bytes:
        return self.take(self.varint())

    def text(self) -> str:
        try:
            return self.chunk().decode()
        except UnicodeDecodeError as error:
            raise WireError(f"a text that is not utf-8: {error}") from error

    def end(self) -> None:
        """Everything has been read."""
        if self.num_left:
            raise WireError(f"{self.num_left} bytes are left over behind {self.what}")


def write_varint(out: bytearray, value: int) -> None:
    assert value >= 0, f"a varint is not negative: {value}"
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def write_signed(out: bytearray, value: int) -> None:
    if not -(1 << 64) <= value < 1 << 64:
        raise ValueError(f"an integer of more than 64 bits cannot be sent: {value}")
    write_varint(out, value << 1 if value >= 0 else ~value << 1 | 1)


def write_f64(out: bytearray, value: float) -> None:
    try:
        out += _F64.pack(value)
    except OverflowError:
        raise ValueError(f"{value} is too large for a float") from None


def write_chunk(out: bytearray, value: bytes) -> None:
    write_varint(out, len(value))
    out += value


def write_text(out: bytearray, value: str) -> None:
    write_chunk(out, value.encode())


def write_varints(values: Iterable[int]) -> bytes:
    """The varints of these numbers, one after the other."""
    out = bytearray()
    for value in values:
        write_varint(out, value)
    return bytes(out)


def read_varints(data: bytes, count: int, largest: int) -> tuple[list[int], bytes]:
    """`count` numbers of at most `largest` each, and the bytes behind them."""
    reader = ByteReader(data, f"a table of {count} numbers")
    values = [reader.varint(largest) for _ in range(count)]
    return values, data[reader.position :]
