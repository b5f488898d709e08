"""Bits on the wire in C: the bytes and values of reference/bits.py, exactly.

Results come from the pool, which is on the CPU: the default device may be one that C cannot write
to.
"""

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, load, parallel
from gradwire.kernels.reference.bits import (
    digit_range_error,
    position_range_error,
    value_range_error,
)

# Bit patterns of -infinity, and of +1 and -1: signs are packed and unpacked as integers.
_MINUS_INFINITY = {
    torch.float16: 0xFC00,
    torch.bfloat16: 0xFF80,
    torch.float32: 0xFF800000,
    torch.float64: 0xFFF0000000000000,
}
_ONE = {
    torch.float16: (0x3C00, 0xBC00),
    torch.bfloat16: (0x3F80, 0xBF80),
    torch.float32: (0x3F800000, 0xBF800000),
    torch.float64: (0x3FF0000000000000, 0xBFF0000000000000),
}


def pack_uints(values: Tensor, width: int) -> Tensor:
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    elif values.dtype not in (torch.uint8, torch.int32, torch.int64):
        values = values.to(torch.int64)
    values = dense(values)
    count = values.numel()
    packed = empty(-(-count * width // 8), torch.uint8)
    if parallel().gw_pack_uints(
        values.data_ptr(), values.element_size(), count, width, packed.data_ptr()
    ):
        raise value_range_error(values, width)
    return packed


def unpack_uints(packed: Tensor, width: int, count: int) -> Tensor:
    packed = dense(packed)
    values = empty(count, torch.int32 if width < 32 else torch.int64)
    parallel().gw_unpack_uints(packed.data_ptr(), count, width, values.data_ptr())
    return values


def pack_signs(x: Tensor) -> Tensor:
    x = dense(x)
    packed = empty(-(-x.numel() // 8), torch.uint8)
    parallel().gw_pack_signs(
        x.data_ptr(), x.element_size(), _MINUS_INFINITY[x.dtype], x.numel(), packed.data_ptr()
    )
    return packed


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    packed = dense(packed)
    x = empty(count, dtype)
    parallel().gw_unpack_signs(
        packed.data_ptr(), count, x.element_size(), *_ONE[dtype], x.data_ptr()
    )
    return x


def ones_positions(packed: Tensor, num_bits: int) -> Tensor:
    packed, library = dense(packed), parallel()
    num_ones = library.gw_count_ones(packed.data_ptr(), num_bits)
    positions = empty(num_ones, torch.int64)
    library.gw_ones_positions(packed.data_ptr(), num_bits, num_ones, positions.data_ptr())
    return positions


def pack_ones(positions: Tensor, num_bits: int) -> Tensor:
    positions = dense(positions)
    packed = empty(-(-num_bits // 8), torch.uint8)
    if load().gw_pack_ones(positions.data_ptr(), positions.numel(), num_bits, packed.data_ptr()):
        raise position_range_error(positions, num_bits)
    return packed


def pack_digits(values: Tensor, base: int, digits: int) -> Tensor:
    values = dense(values.to(torch.int32))
    packed = empty(-(-values.numel() // digits), torch.uint8)
    if load().gw_pack_digits(values.data_ptr(), values.numel(), base, digits, packed.data_ptr()):
        raise digit_range_error(values, base)
    return packed


def unpack_digits(packed: Tensor, base: int, digits: int, count: int) -> Tensor:
    packed = dense(packed)
    values = empty(count, torch.int32)
    load().gw_unpack_digits(packed.data_ptr(), count, base, digits, values.data_ptr())
    return values
