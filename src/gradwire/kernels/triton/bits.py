"""Integers, digits, signs and positions as packed bits, and back: the streams of reference/bits.py.

A value that is out of range shows in a flag, which is read once all is packed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference.bits import (
    digit_range_error,
    position_range_error,
    value_range_error,
)
from gradwire.kernels.triton._common import cdiv, launch, program_start, unpack_symbol

_TILE = 1024  # values, or bytes, of a program


def pack_uints(values: Tensor, width: int) -> Tensor:
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    values, count, device = values.contiguous(), values.numel(), values.device
    packed = torch.empty(cdiv(count * width, 8), dtype=torch.uint8, device=device)
    is_bad = torch.zeros(1, dtype=torch.int32, device=device)
    _pack(values, packed, is_bad, width)
    if count and int(is_bad):
        raise value_range_error(values, width)
    return packed


def pack_signs(x: Tensor) -> Tensor:
    packed = torch.empty(cdiv(x.numel(), 8), dtype=torch.uint8, device=x.device)
    if x.dtype == torch.bfloat16:  # which the interpreter cannot compare
        x = x.float()
    _pack(x.contiguous(), packed, None, 1)
    return packed


def pack_known(symbols: Tensor, packing: tuple[int, int, int]) -> Tensor:
    """Symbols that are in the alphabet, without a look: as pack_uints or pack_digits."""
    alphabet, width, digits = packing
    size = cdiv(symbols.numel(), digits) if digits else cdiv(symbols.numel() * width, 8)
    packed = torch.empty(size, dtype=torch.uint8, device=symbols.device)
    if digits:
        _pack_by_digits(symbols, packed, None, alphabet, digits)
    else:
        _pack(symbols, packed, None, width)
    return packed


def _pack(values: Tensor, packed: Tensor, is_bad: Tensor | None, width: int) -> None:
    """Integers, or the signs of floats."""
    launch(
        _pack_values,
        (cdiv(packed.numel(), _TILE),),
        values,
        packed,
        packed if is_bad is None else is_bad,
        values.numel(),
        packed.numel(),
        WIDTH=width,
        REACH=8 if width == 1 else 7 // width + 2,
        SIGNS=values.dtype.is_floating_point,
        CHECKED=is_bad is not None,
        BLOCK=_TILE,
    )


def unpack_uints(packed: Tensor, width: int, count: int) -> Tensor:
    dtype = torch.int32 if width < 32 else torch.int64
    return _unpack(packed, width, torch.empty(count, dtype=dtype, device=packed.device))


def unpack_signs(packed: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return _unpack(packed, 1, torch.empty(count, dtype=dtype, device=packed.device))


def _unpack(packed: Tensor, width: int, out: Tensor) -> Tensor:
    launch(
        _unpack_values,
        (cdiv(out.numel(), _TILE),),
        packed.contiguous(),
        out,
        out.numel(),
        packed.numel(),
        WIDTH=width,
        REACH=1 if 8 % width == 0 else (width + 14) // 8,
        SIGNS=out.dtype.is_floating_point,
        BLOCK=_TILE,
    )
    return out


def ones_positions(packed: Tensor, num_bits: int) -> Tensor:
    return torch.nonzero(unpack_uints(packed, 1, num_bits)).reshape(-1)


def pack_ones(positions: Tensor, num_bits: int) -> Tensor:
    device = positions.device
    words = torch.zeros(1 + cdiv(num_bits, 32), dtype=torch.int32, device=device)
    launch(
        _set_bits,
        (cdiv(positions.numel(), _TILE),),
        positions.contiguous(),
        words,
        positions.numel(),
        num_bits,
        BLOCK=_TILE,
    )
    if positions.numel() and int(words[0]):
        raise position_range_error(positions, num_bits)
    return words.view(torch.uint8)[4 : 4 + cdiv(num_bits, 8)].clone()


def pack_digits(values: Tensor, base: int, digits: int) -> Tensor:
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    count, device = values.numel(), values.device
    packed = torch.empty(cdiv(count, digits), dtype=torch.uint8, device=device)
    is_bad = torch.zeros(1, dtype=torch.int32, device=device)
    _pack_by_digits(values.contiguous(), packed, is_bad, base, digits)
    if count and int(is_bad):
        raise digit_range_error(values, base)
    return packed


def _pack_by_digits(
    values: Tensor, packed: Tensor, is_bad: Tensor | None, base: int, digits: int
) -> None:
    launch(
        _pack_digits,
        (cdiv(packed.numel(), _TILE),),
        values,
        packed,
        packed if is_bad is None else is_bad,
        values.numel(),
        packed.numel(),
        BASE=base,
        DIGITS=digits,
        CHECKED=is_bad is not None,
        BLOCK=_TILE,
    )


def unpack_digits(packed: Tensor, base: int, digits: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int32, device=packed.device)
    launch(
        _unpack_digits,
        (cdiv(count, _TILE),),
        packed.contiguous(),
        out,
        count,
        BASE=base,
        DIGITS=digits,
        BLOCK=_TILE,
    )
    return out


@triton.jit
def _pack_values(
    values,
    packed,
    is_bad,
    count,
    num_bytes,
    WIDTH: tl.constexpr,
    REACH: tl.constexpr,
    SIGNS: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Byte j holds parts of the values from number 8 j / WIDTH on."""
    j = program_start(BLOCK) + tl.arange(0, BLOCK)
    first = 8 * j // WIDTH
    out = tl.zeros((BLOCK,), tl.int64)
    bad = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(REACH):
        i = first + k
        shift = i * WIDTH - 8 * j  # of the value's lowest bit within this byte
        value = tl.load(values + i, mask=(i < count) & (shift < 8), other=0)
        if SIGNS:
            word = (value < 0).to(tl.int64)
        else:
            word = value.to(tl.int64)
        if CHECKED:
            bad |= ((word >> WIDTH) != 0).to(tl.int32)
        left = tl.where(shift > 0, shift, 0)
        out |= (word << left) >> tl.where(shift < 0, -shift, 0)
    tl.store(packed + j, (out & 0xFF).to(tl.uint8), mask=j < num_bytes)
    if CHECKED:
        if tl.max(bad, axis=0) != 0:
            tl.store(is_bad, 1)


@triton.jit
def _unpack_values(
    packed,
    out,
    count,
    num_bytes,
    WIDTH: tl.constexpr,
    REACH: tl.constexpr,
    SIGNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A value reaches over as many bytes."""
    i = program_start(BLOCK) + tl.arange(0, BLOCK)
    byte, shift = i * WIDTH // 8, i * WIDTH % 8
    word = tl.zeros((BLOCK,), tl.int64)
    for k in tl.static_range(REACH):
        mask = (i < count) & (byte + k < num_bytes)
        word |= tl.load(packed + byte + k, mask=mask, other=0).to(tl.int64) << (8 * k)
    value = (word >> shift) & ((1 << WIDTH) - 1)
    if SIGNS:
        value = tl.where(value != 0, -1.0, 1.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < count)


@triton.jit
def _set_bits(positions, words, count, num_bits, BLOCK: tl.constexpr):
    """Word 0 is set if a position is out of range; the bits follow it."""
    i = program_start(BLOCK) + tl.arange(0, BLOCK)
    mask = i < count
    at = tl.load(positions + i, mask=mask, other=0)
    good = (at >= 0) & (at < num_bits)
    bit = tl.full((BLOCK,), 1, tl.int32) << (at % 32).to(tl.int32)
    tl.atomic_or(words + 1 + at // 32, bit, mask=mask & good)
    if tl.max((mask & (good == 0)).to(tl.int32), axis=0) != 0:
        tl.store(words, 1)


@triton.jit
def _pack_digits(
    values,
    packed,
    is_bad,
    count,
    num_bytes,
    BASE: tl.constexpr,
    DIGITS: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    j = program_start(BLOCK) + tl.arange(0, BLOCK)
    out = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(DIGITS):
        i = j * DIGITS + (DIGITS - 1 - k)  # Horner's scheme: the last one is the highest
        value = tl.load(values + i, mask=i < count, other=0).to(tl.int64)
        bad |= ((value < 0) | (value >= BASE)).to(tl.int32)
        out = out * BASE + value.to(tl.int32)
    tl.store(packed + j, out.to(tl.uint8), mask=j < num_bytes)
    if CHECKED:
        if tl.max(bad, axis=0) != 0:
            tl.store(is_bad, 1)


@triton.jit
def _unpack_digits(
    packed, out, count, BASE: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr
):
    i = program_start(BLOCK) + tl.arange(0, BLOCK)
    tl.store(out + i, unpack_symbol(packed, i, i < count, 8, BASE, DIGITS), mask=i < count)
