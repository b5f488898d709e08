"""Codes of vectors too short for a trellis and its tables; `dq` tries them as alternatives.

Both begin with a byte that names the code and two bytes of a magnitude. `encode_peaks` codes the
positions and signs of some of the largest numbers; `encode_plain` codes all numbers, at a few bits
each.
"""

import math

import torch
from torch import Tensor

from gradwire.coding.trellis import to_bytes
from gradwire.compression.quantization._powers import largest_magnitude
from gradwire.core.errors import WireError
from gradwire.core.symbols import pack_symbols, packed_bytes, unpack_symbols

PEAKS, PLAIN = 16, 32  # the first byte
_MOST_PEAKS = 4096
_MOST_BITS = 12  # of a number coded by itself


def encode_peaks(x: Tensor, room: int) -> tuple[float, bytearray]:
    """The error and the code of some of the largest numbers, all of one magnitude.

    After the first byte that magnitude, then per number as many bits as a position takes and a
    sign. One that occurs again fills the last byte.
    """
    width = _position_bits(x.numel()) + 1
    fit = max(1, min(8 * (room - 3) // width, x.numel(), _MOST_PEAKS))
    values, positions = (x.abs() / largest_magnitude(x)).double().topk(fit)
    numbers = torch.arange(1, fit + 1, dtype=torch.float64, device="cpu")
    count = int((values.cumsum(0).square() / numbers).argmax()) + 1
    magnitude = to_short_float(float(values[:count].mean()) * largest_magnitude(x), x.dtype)
    negative = (x[positions[:count]] < 0).tolist()
    entries = [2 * i + minus for i, minus in zip(positions[:count].tolist(), negative)]
    size = -(-count * width // 8)
    entries += [entries[-1]] * (8 * size // width - count)
    packed = to_bytes("".join(f"{entry:0{width}b}" for entry in entries))
    code = bytearray([PEAKS]) + magnitude.to_bytes(2, "little") + packed
    code += bytes(3 + size - len(code))
    level = float(from_short_float(magnitude, x.dtype)) / largest_magnitude(x)
    energy = float((x.double() / largest_magnitude(x)).square().sum())
    gain = level * (2 * float(values[:count].sum()) - level * count)
    return 1 - gain / energy, code


def decode_peaks(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    width = _position_bits(numel) + 1
    most = -(-min(numel, _MOST_PEAKS) * width // 8)
    if not 4 <= packed.numel() <= 3 + most:
        raise WireError(f"code: {packed.numel()} bytes of peaks in {numel} elements")
    level = from_short_float(read_two_bytes(packed[1:3]), dtype)
    if not bool((level > 0) & torch.isfinite(level)):
        raise WireError("code: a magnitude that is not positive and finite")
    bits = "".join(f"{byte:08b}" for byte in packed[3:].tolist())
    count = len(bits) // width
    entries = [int(bits[i * width : (i + 1) * width], 2) for i in range(count)]
    if not entries or max(entries) >= 2 * numel or "1" in bits[count * width :]:
        raise WireError(f"code: peaks beyond {numel} elements")
    values = torch.zeros(numel, dtype=dtype, device="cpu")
    numbers = torch.tensor(entries, device="cpu")
    values[numbers >> 1] = torch.where(numbers % 2 == 1, -level, level)
    return values


def encode_plain(x: Tensor, room: int) -> tuple[float, bytearray]:
    """The error and the code of every number by itself: (symbol + 1/2) step less half the range."""
    numel, most = x.numel(), room - 3
    bits = min(_MOST_BITS, 8 * most // numel)
    if bits < 1:
        return math.inf, bytearray()
    bits = _plain_bits(packed_bytes(numel, 1 << bits), numel)
    half = 1 << (bits - 1)
    y = x.double() / largest_magnitude(x)
    # From steps that cover all of it to those that cut off the larger numbers.
    tries = [2.0 ** (-i / 4) / half for i in range(12)]
    if bits == 1:
        tries = [2 * float(y.abs().mean())]
    least, code = math.inf, bytearray()
    for step in tries:
        number = to_short_float(step * largest_magnitude(x), x.dtype)
        wire = float(from_short_float(number, x.dtype)) / largest_magnitude(x)
        if not wire:
            continue
        symbols = (y / wire).floor().clamp(-half, half - 1)
        error = float(((symbols + 0.5) * wire - y).square().sum() / y.square().sum())
        if error < least:
            packed = pack_symbols(symbols.to(torch.int64) + half, 1 << bits)
            code = bytearray([PLAIN]) + number.to_bytes(2, "little")
            code += bytes(packed.tolist())
            least = error
    return least, code


def decode_plain(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    bits = _plain_bits(packed.numel() - 3, numel)
    if bits < 1 or packed.numel() - 3 != packed_bytes(numel, 1 << bits):
        raise WireError(f"code: {packed.numel()} bytes of {numel} plain numbers")
    step = from_short_float(read_two_bytes(packed[1:3]), dtype)
    if not bool((step > 0) & torch.isfinite(step)):
        raise WireError("code: a step that is not positive and finite")
    symbols = unpack_symbols(packed[3:].clone(), numel, 1 << bits)
    return (symbols.to(dtype) - (1 << (bits - 1)) + 0.5) * step


def _plain_bits(num_bytes: int, numel: int) -> int:
    return min(_MOST_BITS, 8 * num_bytes // numel)


def _position_bits(numel: int) -> int:
    return (numel - 1).bit_length()


def to_short_float(number: float, dtype: torch.dtype) -> int:
    """The first 16 bits of a positive number after its sign, rounded."""
    whole, infinity = (_as_int(value, dtype) for value in (number, math.inf))
    shift = 8 * dtype.itemsize - 17
    return min((whole + (1 << (shift - 1))) >> shift, (infinity >> shift) - 1)


def from_short_float(number: int, dtype: torch.dtype) -> Tensor:
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    return torch.tensor(number << (8 * dtype.itemsize - 17), dtype=integer, device="cpu").view(
        dtype
    )


def _as_int(number: float, dtype: torch.dtype) -> int:
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    return int(torch.tensor(number, dtype=dtype, device="cpu").view(integer))


def read_two_bytes(packed: Tensor) -> int:
    return int.from_bytes(bytes(packed.tolist()), "little")
