"""Bits on the wire, little-endian: bit b of a stream is bit b % 8 of byte b // 8.

Value i of a packed sequence occupies bits i * width .. (i + 1) * width - 1. Eight values fill
exactly `width` bytes, so a sequence is a matrix of groups and packing is a fixed pattern of
shifts between the columns of values and the columns of bytes. (The layout is that of
Parquet's bit-packed runs.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# bool and the wide unsigned types lack torch arithmetic.
_ARITHMETIC = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def value_range_error(values: Tensor, width: int) -> ValueError:
    low, high = int(values.min()), int(values.max())
    return ValueError(
        f"pack_uints at width {width} takes values in 0 .. {2**width - 1}, "
        f"got values from {low} to {high}"
    )


def position_range_error(positions: Tensor, num_bits: int) -> ValueError:
    low, high = int(positions.min()), int(positions.max())
    return ValueError(
        f"pack_ones over {num_bits} bits takes positions in 0 .. {num_bits - 1}, "
        f"got positions from {low} to {high}"
    )


def digit_range_error(values: Tensor, base: int) -> ValueError:
    low, high = int(values.min()), int(values.max())
    return ValueError(
        f"pack_digits takes values in 0 .. {base - 1}, got values from {low} to {high}"
    )


def _word(width: int) -> torch.dtype:
    """The smallest type in which a value, shifted within a byte's reach, stays positive."""
    return torch.int32 if width <= 24 else torch.int64


def pack_uints(values: Tensor, width: int) -> Tensor:
    count = values.numel()
    if values.dtype not in _ARITHMETIC:
        values = values.to(torch.int64)
    if count:
        low, high = torch.aminmax(values)
        if int(low) < 0 or int(high) >= 2**width:
            raise value_range_error(values, width)
    values = values.to(_word(width))
    groups = F.pad(values, (0, -count % 8)).reshape(-1, 8)  # [num_groups, 8]
    packed = torch.zeros(len(groups), width, dtype=torch.uint8, device=values.device)
    for byte in range(width):
        for i in range(8 * byte // width, (8 * byte + 7) // width + 1):
            shift = i * width - 8 * byte  # of value i's lowest bit within this byte
            part = groups[:, i] << shift if shift >= 0 else groups[:, i] >> -shift
            packed[:, byte] |= (part & 0xFF).to(torch.uint8)
    return packed.reshape(-1)[: -(-count * width // 8)]


def unpack_uints(packed: Tensor, width: int, count: int) -> Tensor:
    num_groups = -(-count // 8)
    padding = num_groups * width - packed.numel()
    groups = F.pad(packed, (0, padding)).reshape(-1, width)  # [num_groups, width]
    values = torch.zeros(num_groups, 8, dtype=_word(width), device=packed.device)
    for i in range(8):
        for byte in range(i * width // 8, (i * width + width - 1) // 8 + 1):
            shift = 8 * byte - i * width  # of this byte's lowest bit within value i
            part = groups[:, byte].to(_word(width))
            values[:, i] |= part << shift if shift >= 0 else part >> -shift
    values &= 2**width - 1
    return values.reshape(-1)[:count].to(torch.int32 if width < 32 else torch.int64)


def pack_signs(x: Tensor) -> Tensor:
    return pack_uints(x < 0, 1)


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return (1 - 2 * unpack_uints(packed, 1, count)).to(dtype)


def ones_positions(packed: Tensor, num_bits: int) -> Tensor:
    return torch.nonzero(unpack_uints(packed, 1, num_bits)).reshape(-1)


def pack_ones(positions: Tensor, num_bits: int) -> Tensor:
    if bool(((positions < 0) | (positions >= num_bits)).any()):
        raise position_range_error(positions, num_bits)
    bits = torch.zeros(num_bits, dtype=torch.uint8, device=positions.device)
    bits[positions] = 1
    return pack_uints(bits, 1)


def pack_digits(values: Tensor, base: int, digits: int) -> Tensor:
    """`digits` values of 0 .. base - 1 in each byte, the first one least significant."""
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < base:
        raise digit_range_error(values, base)
    count = -(-values.numel() // digits)
    padded = torch.nn.functional.pad(values.to(torch.int32), (0, count * digits - values.numel()))
    weights = base ** torch.arange(digits, dtype=torch.int32, device=values.device)
    return (padded.reshape(count, digits) * weights).sum(dim=1).to(torch.uint8)


def unpack_digits(packed: Tensor, base: int, digits: int, count: int) -> Tensor:
    weights = base ** torch.arange(digits, dtype=torch.int32, device=packed.device)
    return (packed.to(torch.int32)[:, None] // weights % base).reshape(-1)[:count]
