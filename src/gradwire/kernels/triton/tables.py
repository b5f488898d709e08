"""Rounding to tables of levels, packed, and back, as in reference/tables.py.

What is summed or compared in each bucket is in _sums.py. Symbols of up to 8 bits are packed by the
program that makes them; digits, which eight elements do not fill, and wider ones by a second pass.
Runs are shortened by the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference.tables import Draw, Packing
from gradwire.kernels.triton._common import (
    cdiv,
    divide,
    floor_small,
    halfwords,
    key_words,
    launch,
    power_of_two,
    program_start,
    store_packed,
    uint32,
    unit_dither,
    unpack_symbol,
)
from gradwire.kernels.triton._sums import bucket_extremes as bucket_extremes
from gradwire.kernels.triton._sums import bucket_maxima as bucket_maxima
from gradwire.kernels.triton._sums import bucket_sides as bucket_sides
from gradwire.kernels.triton._sums import bucket_squares as bucket_squares
from gradwire.kernels.triton._sums import cell_products as cell_products
from gradwire.kernels.triton.bits import pack_known

_GROUPS = 128  # of eight elements, of a program
_TILE = 8 * _GROUPS
_NO_DRAW: Draw = (0, (0, 0, 0))
_LEVELS = tl.constexpr(0)
_WHOLE = tl.constexpr(1)
_NEAREST = tl.constexpr(2)
_CELLS = tl.constexpr(3)
_E4M3 = tl.constexpr(4)
_E5M2 = tl.constexpr(5)


def to_levels(
    x: Tensor, scale: Tensor | None, bucket: int, levels: Tensor, draw: Draw, packing: Packing
) -> Tensor:
    s = len(levels) - 1
    return _round(x, scale, None, bucket, levels, s, 0, draw, packing, _LEVELS)


def to_whole(
    x: Tensor,
    step: Tensor,
    start: Tensor | None,
    bucket: int,
    least: int,
    most: int,
    draw: Draw | None,
    packing: Packing,
) -> Tensor:
    kind = _NEAREST if draw is None else _WHOLE
    return _round(x, step, start, bucket, None, least, most, draw or _NO_DRAW, packing, kind)


def to_cells(x: Tensor, scale: Tensor, bucket: int, edges: Tensor, packing: Packing) -> Tensor:
    return _round(x, scale, None, bucket, edges, len(edges), 0, _NO_DRAW, packing, _CELLS)


def to_fp8(x: Tensor, scale: Tensor, bucket: int, dtype: torch.dtype) -> Tensor:
    kind = _E4M3 if dtype == torch.float8_e4m3fn else _E5M2
    return _round(x, scale, None, bucket, None, 0, 0, _NO_DRAW, (256, 8, 0), kind)


def _round(
    x: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
    bucket: int,
    table: Tensor | None,
    first: int,
    second: int,
    draw: Draw,
    packing: Packing,
    kind: tl.constexpr,
) -> Tensor:
    """`first` and `second` are least and most, or the length of the table."""
    alphabet, width, digits = packing
    count, x = x.numel(), x.contiguous()
    fused = not digits and width <= 8
    if fused:
        out = torch.empty(cdiv(count * width, 8), dtype=torch.uint8, device=x.device)
    else:
        symbols = torch.uint8 if alphabet <= 256 else torch.int32
        out = torch.empty(count, dtype=symbols, device=x.device)
    length = 0 if table is None else len(table)
    launch(
        _to_symbols,
        (cdiv(count, _TILE),),
        x,
        *_scales(x, scale, start),
        x if table is None else table.contiguous(),
        out,
        count,
        out.numel(),
        first,
        second,
        bucket,
        *key_words(*draw),
        KIND=kind.value,
        STEPS=length.bit_length(),
        FUSED=fused,
        WIDTH=width if fused else 8,
        BYTES=power_of_two(width) if fused else 8,
        WIDE=fused and width in (2, 4) and not out.data_ptr() % width,
        GROUPS=_GROUPS,
        **_buckets(count, bucket, scale, start),
    )
    return out if fused else pack_known(out, packing)


def from_table(
    packed: Tensor,
    packing: Packing,
    table: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
    bucket: int,
    count: int,
) -> tuple[Tensor, bool]:
    is_bad = torch.zeros(1, dtype=torch.int32, device=table.device)
    out = _look_up(packed, packing, table, scale, start, bucket, count, is_bad)
    return out, not (count and int(is_bad))


def from_table_unchecked(
    packed: Tensor,
    packing: Packing,
    table: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
    bucket: int,
    count: int,
) -> tuple[Tensor, bool]:
    """`from_table` of symbols that are known to be good: nobody waits for the device."""
    is_bad = torch.empty(1, dtype=torch.int32, device=table.device)
    return _look_up(packed, packing, table, scale, start, bucket, count, is_bad), True


def _look_up(
    packed: Tensor,
    packing: Packing,
    table: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
    bucket: int,
    count: int,
    is_bad: Tensor,
) -> Tensor:
    alphabet, width, digits = packing
    out = torch.empty(count, dtype=table.dtype, device=table.device)
    launch(
        _from_table,
        (cdiv(count, _TILE),),
        packed.contiguous(),
        table.contiguous(),
        *_scales(table, scale, start),
        out,
        is_bad,
        count,
        bucket,
        WIDTH=width,
        BASE=alphabet,
        DIGITS=digits,
        MOST=alphabet**digits if digits else alphabet,
        LARGEST=torch.finfo(table.dtype).max,
        BLOCK=_TILE,
        **_buckets(count, bucket, scale, start),
    )
    return out


def from_pairs(packed: Tensor, pairs: Tensor, bucket: int, count: int) -> Tensor:
    out = torch.empty(count, dtype=pairs.dtype, device=pairs.device)
    launch(
        _from_pairs,
        (cdiv(count, _TILE),),
        packed.contiguous(),
        pairs.contiguous(),
        out,
        count,
        bucket,
        BLOCK=_TILE,
        **_buckets(count, bucket, pairs, None),
    )
    return out


def _scales(like: Tensor, scale: Tensor | None, start: Tensor | None) -> tuple[Tensor, Tensor]:
    return (
        like if scale is None else scale.contiguous(),
        like if start is None else start.contiguous(),
    )


def _buckets(
    count: int, bucket: int, scale: Tensor | None, start: Tensor | None
) -> dict[str, int | bool]:
    """How a kernel finds the bucket of an element, and whether there is something of it."""
    known = bucket >= count or power_of_two(bucket) == bucket
    return {
        "SHIFT": 40 if bucket >= count else bucket.bit_length() - 1 if known else -1,
        "SHORT": count < 1 << 31,
        "HAS_SCALE": scale is not None,
        "HAS_START": start is not None,
    }


@triton.jit
def _bucket_of(at, bucket, SHIFT: tl.constexpr, SHORT: tl.constexpr):
    if SHIFT >= 0:
        b = at >> SHIFT
    elif SHORT:  # divides much faster
        b = (at.to(tl.uint32) // uint32(bucket)).to(tl.int64)
    else:
        b = at // bucket
    return b


@triton.jit
def _clamp(x, low, high):
    return tl.where(x > high, high, tl.where(x < low, low, x))


@triton.jit
def _count_reached(v, edges, number, STEPS: tl.constexpr):
    """How many of `number` < 2^STEPS ascending edges lie at or below v."""
    found = tl.zeros_like(v).to(tl.int32)
    for step in tl.static_range(STEPS):
        further = found + (1 << (STEPS - 1 - step))
        inside = further <= number
        edge = tl.load(edges + further - 1, mask=inside, other=0)
        found = tl.where(inside & (edge <= v), further, found)
    return found


@triton.jit
def _to_nearest(x):
    """Ties to even; floor(x) and the rest are exact."""
    whole = floor_small(x)
    rest = x - whole
    odd = (whole.to(tl.int32) & 1) != 0
    return whole + ((rest > 0.5) | ((rest == 0.5) & odd)).to(x.dtype)


@triton.jit
def _to_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The byte of a float32 in the range of the format, to nearest and ties to even."""
    LEAST: tl.constexpr = 2.0 ** (1 - BIAS)  # the smallest normal number
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> (23 - MANTISSA)) & 1
    normal = (magnitude + ((1 << (22 - MANTISSA)) - 1) + odd) >> (23 - MANTISSA)
    normal = normal - ((127 - BIAS) << MANTISSA)
    small = tl.abs(x) < LEAST
    subnormal = _to_nearest(tl.where(small, tl.abs(x), 0.0) * (2.0 ** (MANTISSA + BIAS - 1)))
    return tl.where(small, subnormal.to(tl.int32), normal) | ((bits >> 24) & 0x80)


@triton.jit
def _to_symbols(
    x,
    scale,
    start,
    table,
    out,
    count,
    num_bytes,
    first,
    second,
    bucket,
    k0,
    k1,
    s0,
    s1,
    s2,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    FUSED: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
    SHORT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_START: tl.constexpr,
):
    group = program_start(GROUPS) + tl.arange(0, GROUPS)
    at = 8 * group[:, None] + tl.arange(0, 8)[None, :]
    mask = at < count
    v = tl.load(x + at, mask=mask, other=0)
    mine = _bucket_of(at, bucket, SHIFT, SHORT)
    if HAS_START:
        v = v - tl.load(start + mine, mask=mask, other=0)
    if HAS_SCALE:
        divisor = tl.load(scale + mine, mask=mask, other=0)
        v = divide(v, tl.where(divisor > 0, divisor, 1.0))
    if KIND == _LEVELS:
        if HAS_SCALE:
            v = _clamp(v, -1.0, 1.0)
        magnitude = tl.abs(v)
        low = _count_reached(magnitude, table + 1, first - 1, STEPS)
        floor = tl.load(table + low)
        gap = tl.load(table + low + 1) - floor
        fraction = divide(magnitude - floor, tl.where(gap > 0, gap, 1.0))
        half = halfwords(group, k0, k1, s0, s1, s2)
        level = low + (unit_dither(half, v) < _clamp(fraction, 0.0, 1.0)).to(tl.int32)
        symbol = tl.where(v < 0, first - level, first + level)
    elif KIND == _CELLS:
        symbol = _count_reached(v, table, first, STEPS)
    elif KIND == _E4M3:
        symbol = _to_fp8((_clamp(v, -1.0, 1.0) * 448.0).to(tl.float32), 3, 7)
    elif KIND == _E5M2:
        symbol = _to_fp8((_clamp(v, -1.0, 1.0) * 57344.0).to(tl.float32), 2, 15)
    else:
        v = _clamp(v, tl.full((), first, v.dtype), tl.full((), second, v.dtype))
        if KIND == _NEAREST:
            whole = _to_nearest(v)
        else:
            floor = floor_small(v)
            half = halfwords(group, k0, k1, s0, s1, s2)
            whole = floor + (unit_dither(half, v) < v - floor).to(v.dtype)
        symbol = whole.to(tl.int32) - first
    if FUSED:
        whole_tile = program_start(GROUPS) * 8 + GROUPS * 8 <= count
        symbol = tl.where(mask, symbol, 0)
        store_packed(out, symbol, group, num_bytes, whole_tile, WIDTH, WIDE, BYTES)
    else:
        tl.store(out + at, symbol.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _from_table(
    packed,
    table,
    scale,
    start,
    out,
    is_bad,
    count,
    bucket,
    WIDTH: tl.constexpr,
    BASE: tl.constexpr,
    DIGITS: tl.constexpr,
    MOST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    SHORT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_START: tl.constexpr,
):
    at = program_start(BLOCK) + tl.arange(0, BLOCK)
    mask = at < count
    if DIGITS > 0:
        digit = at.to(tl.uint32) if SHORT else at  # 32 bits divide much faster
        symbol = unpack_symbol(packed, digit, mask, WIDTH, BASE, DIGITS)
        bad = tl.load(packed + digit // DIGITS, mask=mask, other=0).to(tl.int32) >= MOST
    else:
        symbol = unpack_symbol(packed, at, mask, WIDTH, BASE, DIGITS)
        bad = symbol >= MOST
    v = tl.load(table + symbol, mask=mask & (symbol < BASE), other=0)
    bad = bad | (tl.abs(v) > LARGEST) | (v != v)
    if tl.max((mask & bad).to(tl.int32), axis=0) != 0:
        tl.store(is_bad, 1)
    mine = _bucket_of(at, bucket, SHIFT, SHORT)
    if HAS_SCALE:
        v = v * tl.load(scale + mine, mask=mask, other=0)
    if HAS_START:
        v = v + tl.load(start + mine, mask=mask, other=0)
    tl.store(out + at, _clamp(v, -LARGEST, LARGEST).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _from_pairs(
    packed,
    pairs,
    out,
    count,
    bucket,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    SHORT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_START: tl.constexpr,
):
    at = program_start(BLOCK) + tl.arange(0, BLOCK)
    mask = at < count
    bit = unpack_symbol(packed, at, mask, 1, 0, 0)
    mine = _bucket_of(at, bucket, SHIFT, SHORT)
    tl.store(out + at, tl.load(pairs + 2 * mine + bit, mask=mask, other=0), mask=mask)
