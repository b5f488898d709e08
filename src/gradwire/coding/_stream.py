"""Shared by coders of symbols: one stream of bytes, numbers in front, fixed width as fallback.

    byte 0    0: the symbols at fixed width follow, because no code of them is shorter
              1: a coder's own stream follows

A vector whose symbols are known beforehand, because there are none or the alphabet has only one,
takes no byte at all. The receiver knows the number of symbols and the alphabet.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.core.errors import WireError
from gradwire.core.symbols import pack_symbols, packed_bytes, symbol_bits, unpack_symbols

_STORED, _CODED = 0, 1
_MAX_TABLE_BITS = 12

# The bytes in front of a coder's stream, and what follows them; None where fixed width is shorter.
Coded = tuple[bytes, list[Tensor]] | None


class StreamReader:
    """Reads a received stream from its front; missing bytes are a WireError."""

    def __init__(self, packed: Tensor) -> None:
        self.rest = packed

    def take(self, num_bytes: int, what: str) -> Tensor:
        if num_bytes > self.rest.numel():
            raise WireError(f"{self.rest.numel()} bytes are left for {num_bytes} bytes of {what}")
        taken, self.rest = self.rest[:num_bytes], self.rest[num_bytes:]
        return taken

    def read_number(self, largest: int, what: str) -> int:
        """A number in 0 .. largest, in as many bytes as `largest` needs."""
        value = int.from_bytes(bytes(self.take(number_bytes(largest), what).tolist()), "little")
        if value > largest:
            raise WireError(f"{value} as {what}, expected 0 .. {largest}")
        return value

    def end(self) -> None:
        if self.rest.numel():
            raise WireError(f"{self.rest.numel()} bytes too many behind a stream of symbols")


def number_bytes(largest: int) -> int:
    return -(-largest.bit_length() // 8)


def write_number(value: int, largest: int) -> bytes:
    """A number in 0 .. largest as `StreamReader.read_number` reads it."""
    assert 0 <= value <= largest
    return value.to_bytes(number_bytes(largest), "little")


def concatenate(head: bytes, parts: list[Tensor], device: torch.device) -> Tensor:
    """Bytes and the parts behind them in one uint8."""
    front = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return torch.cat([front.to(device), *(part.to(device) for part in parts)])


def write_symbols(symbols: Tensor, alphabet: int, code: Callable[[Tensor], Coded]) -> Tensor:
    """The shorter of `code(symbols)`, if there is such a code, and the symbols at fixed width."""
    if symbols.numel() == 0 or alphabet == 1:
        return torch.empty(0, dtype=torch.uint8, device=symbols.device)
    coded = code(symbols)
    if coded is not None:
        head, parts = coded
        if len(head) + sum(map(Tensor.numel, parts)) < packed_bytes(symbols.numel(), alphabet):
            return concatenate(bytes([_CODED]) + head, parts, symbols.device)
    return concatenate(bytes([_STORED]), [pack_symbols(symbols, alphabet)], symbols.device)


def read_symbols(
    packed: Tensor, count: int, alphabet: int, decode: Callable[[StreamReader], Tensor]
) -> Tensor:
    """The inverse of `write_symbols`, as int32 [count]; `decode` reads the coder's own stream.

    What a kernel refuses with a ValueError is a WireError here.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 1:
        raise WireError(f"coded symbols are uint8 [size], got {packed.dtype} {list(packed.shape)}")
    reader = StreamReader(packed)
    if count == 0 or alphabet == 1:
        reader.end()
        return torch.zeros(count, dtype=torch.int32, device=packed.device)
    size = packed_bytes(count, alphabet)
    if packed.numel() > 1 + size:
        raise WireError(f"{packed.numel()} bytes of {count} symbols, expected at most {1 + size}")
    if reader.read_number(1, "mode") == _STORED:
        symbols = unpack_symbols(reader.take(size, "symbols"), count, alphabet)
    else:
        symbols = call_kernel(decode, reader)
    reader.end()
    return symbols.to(torch.int32)


def call_kernel(decode: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a kernel on received bytes; turns its ValueError into a WireError."""
    try:
        return decode(*arguments)
    except WireError:
        raise
    except ValueError as error:
        raise WireError(str(error)) from None


def most_frequent(counts: Tensor) -> int:
    """The most frequent symbol, of several the smallest."""
    return int(counts.cpu().numpy().argmax())


def low_width(alphabet: int) -> int:
    """How many low bits of a symbol a coder with a table of frequencies leaves as they are.

    Beyond 4096 entries a table costs more than it saves, and low bits of that many levels are
    as good as uniform.
    """
    return max(0, symbol_bits(alphabet) - _MAX_TABLE_BITS)


def table_size(alphabet: int) -> int:
    """How many different symbols are left without the low bits."""
    return ((alphabet - 1) >> low_width(alphabet)) + 1


def split_low(symbols: Tensor, alphabet: int) -> tuple[Tensor, list[Tensor]]:
    """Symbols without their low bits, and those, if there are any, at fixed width as uint8."""
    width = low_width(alphabet)
    if not width:
        return symbols, []
    low = symbols & ((1 << width) - 1)
    return symbols >> width, [kernels.pack_uints(low, width)]


def take_low(reader: StreamReader, count: int, alphabet: int) -> Tensor | None:
    """The low bits that `split_low` took from `count` symbols, None if there are none."""
    width = low_width(alphabet)
    if not width:
        return None
    packed = reader.take(-(-count * width // 8), "low bits")
    return kernels.unpack_uints(packed, width, count)


def join_low(high: Tensor, low: Tensor | None, alphabet: int) -> Tensor:
    """The inverse of `split_low`; a symbol beyond the alphabet is a WireError."""
    if low is None:
        return high
    symbols = high << low_width(alphabet) | low
    if int(symbols.max()) >= alphabet:
        raise WireError(f"symbol {int(symbols.max())}, expected 0 .. {alphabet - 1}")
    return symbols
