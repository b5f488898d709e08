"""Rounding at random to whole levels of a bucket's maximum, as in reference/levels.py.

One program does some whole buckets, from the maximum to what is lost, if their length is a power
of two of at most _SMALL. Other buckets get their maxima from a kernel of their own. Rows of a
matrix are vectors of their own; row r draws from the stream whose last word is r more.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import (
    cdiv,
    floor_small,
    halfwords,
    key_words,
    launch,
    load_block,
    power_of_two,
    program_start,
    store_block,
    store_packed,
    uint32,
    unit_dither,
    unpack_symbol,
)

_TILE = 2048  # elements of a program
_SMALL = 2048  # elements of a bucket that one program does
_TINY = tl.constexpr(2.0**-100)  # reference/levels.py says why
_RAISE = tl.constexpr(2.0**100)
_LARGEST = tl.constexpr(float(torch.finfo(torch.float32).max))


def encode_levels(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    count = x.numel()
    if into is None:
        into = _results(1, count, bucket, width, x.device)
    _encode(x, residual, num_levels, bucket, width, seed, stream, out, *into, (1, count))
    return into if into[0].dim() == 1 else (into[0].reshape(-1), into[1].reshape(-1))


def encode_levels_rows(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    rows, count = x.shape
    into = _results(rows, count, bucket, width, x.device)
    _encode(x, residual, num_levels, bucket, width, seed, stream, out, *into, (rows, count))
    return into


def _results(
    rows: int, count: int, bucket: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    scale = torch.empty(rows, cdiv(count, bucket), dtype=torch.float32, device=device)
    return scale, torch.empty(rows, cdiv(count * width, 8), dtype=torch.uint8, device=device)


def _encode(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None,
    scale: Tensor,
    packed: Tensor,
    shape: tuple[int, int],
) -> None:
    rows, count = shape
    if not rows or not count:
        return
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    given = x, x if residual is None else residual, x if out is None else out
    fused, num_buckets = _fuses(bucket), cdiv(count, bucket)
    if not fused:
        scale.zero_()  # the least magnitude, for atomic maxima
        block = min(_TILE, power_of_two(bucket))
        blocks = cdiv(bucket, block)  # of one bucket
        launch(
            _maxima,
            (cdiv(num_buckets * blocks, _TILE // block), rows),
            *given[:2],
            scale,
            count,
            bucket,
            num_buckets,
            blocks,
            ROWS=_TILE // block,
            BLOCK=block,
            HAS_RESIDUAL=residual is not None,
        )
    num_bytes = cdiv(count * width, 8)
    # Eight symbols are one number of 16 or 32 bits, stored at once if memory is aligned.
    wide = (
        width in (2, 4) and not packed.data_ptr() % width and (rows == 1 or not num_bytes % width)
    )
    launch(
        _levels,
        (cdiv(count, _TILE), rows),
        *given,
        scale,
        packed,
        count,
        num_bytes,
        num_buckets,
        bucket,
        num_levels,
        *key_words(seed, stream),
        **_options(bucket, width, rows == 1, wide, residual is not None, out is not None),
    )


def _fuses(bucket: int) -> bool:
    return bucket <= _SMALL and power_of_two(bucket) == bucket


@lru_cache(maxsize=256)
def _options(
    bucket: int, width: int, one_row: bool, wide: bool, fed: bool, has_out: bool
) -> dict[str, int | bool]:
    fused = _fuses(bucket)
    return {
        "WIDTH": width,
        "BUCKET": bucket if fused else 8,
        "BUCKETS": _TILE // (bucket if fused else 8),
        "FUSED": fused,
        "WIDE": wide,
        "BYTES": power_of_two(width),
        "ONE_ROW": one_row,
        "HAS_RESIDUAL": fed,
        "HAS_OUT": has_out,
    }


def decode_levels(
    packed: Tensor,
    scale: Tensor,
    num_levels: int,
    bucket: int,
    width: int,
    count: int,
    out: Tensor | None,
    checked: bool = True,
) -> tuple[Tensor, int]:
    device = packed.device
    if out is None:
        out = torch.empty(count, dtype=torch.float32, device=device)
    if not count:
        return out, 0
    highest = torch.zeros(1, dtype=torch.int32, device=device) if checked else packed
    fused = _fuses(bucket)
    launch(
        _decode,
        (cdiv(count, _TILE),),
        packed.contiguous(),
        scale.contiguous(),
        out,
        highest,
        count,
        bucket,
        num_levels,
        WIDTH=width,
        BUCKET=bucket if fused else 8,
        BUCKETS=_TILE // (bucket if fused else 8),
        FUSED=fused,
        CHECKED=checked,
    )
    return out, int(highest) if checked else 0


@triton.jit
def _load_sum(x, residual, at, count, is_whole, base, HAS_RESIDUAL: tl.constexpr):
    p = load_block(x + base, at, count, is_whole)
    if HAS_RESIDUAL:
        p = p + load_block(residual + base, at, count, is_whole)
    return p


@triton.jit
def _magnitude_bits(p):
    """Ordered like magnitudes, with NaN above infinity."""
    return p.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _maxima(
    x,
    residual,
    scale,
    count,
    bucket,
    num_buckets,
    blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """The largest magnitude of blocks of buckets. Which one comes first does not matter."""
    row = tl.program_id(1).to(tl.int64)
    j = program_start(ROWS) + tl.arange(0, ROWS)
    b = j // blocks
    offset = (j % blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = b[:, None] * bucket + offset
    mask = (offset < bucket) & (at < count)
    p = tl.load(x + row * count + at, mask=mask, other=0)
    if HAS_RESIDUAL:
        p = p + tl.load(residual + row * count + at, mask=mask, other=0)
    largest = tl.max(_magnitude_bits(p), axis=1)
    to = (scale + row * num_buckets + b).to(tl.pointer_type(tl.int32))
    tl.atomic_max(to, largest, mask=b < num_buckets)


@triton.jit
def _step(scale, num_levels):
    """What a level is worth in raised buckets, and what brings them back."""
    is_tiny = scale < _TINY
    raised = tl.where(is_tiny, _RAISE, 1.0)
    step = tl.div_rn(scale * raised, tl.zeros_like(scale) + tl.full((), num_levels, tl.float32))
    return step, tl.where(is_tiny, _TINY, 1.0)


@triton.jit
def _decoded(level, step, lowered):
    value = level * step * lowered
    # Not by tl.minimum: what is not finite may become anything, but always the same.
    value = tl.where(value > _LARGEST, _LARGEST, value)
    return tl.where(value < -_LARGEST, -_LARGEST, value)


@triton.jit
def _levels(
    x,
    residual,
    out,
    scale,
    packed,
    count,
    num_bytes,
    num_buckets,
    bucket,
    num_levels,
    k0,
    k1,
    s0,
    s1,
    s2,
    WIDTH: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    FUSED: tl.constexpr,
    WIDE: tl.constexpr,
    BYTES: tl.constexpr,
    ONE_ROW: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_OUT: tl.constexpr,
):
    """[BUCKETS, BUCKET] elements; where not FUSED each row is eight elements of some bucket."""
    TILE: tl.constexpr = BUCKETS * BUCKET
    GROUPS: tl.constexpr = TILE // 8
    row = tl.program_id(1).to(tl.int64)
    start = program_start(TILE)
    whole = start + TILE <= count
    b = program_start(BUCKETS) + tl.arange(0, BUCKETS)
    at = b[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    base = 0 if ONE_ROW else row * count  # whose alignment is not known
    p = _load_sum(x, residual, at, count, whole, base, HAS_RESIDUAL)
    if FUSED:
        largest = tl.max(_magnitude_bits(p), axis=1).to(tl.float32, bitcast=True)
        tl.store(scale + row * num_buckets + b, largest, mask=b < num_buckets)
    else:
        mine = b.to(tl.uint32) // uint32(bucket // 8)
        largest = tl.load(scale + row * num_buckets + mine, mask=mine < num_buckets, other=0)
    raised = tl.where(largest < _TINY, _RAISE, 1.0)
    s = tl.zeros_like(largest) + tl.full((), num_levels, tl.float32)
    factor = tl.div_rn(s, tl.where(largest > 0, largest * raised, 1.0))
    factor = tl.where(largest > 0, factor, 0.0)
    scaled = p * raised[:, None] * factor[:, None]
    most = tl.full((), num_levels, tl.float32)
    scaled = tl.where(scaled > most, most, tl.where(scaled < -most, -most, scaled))
    group = program_start(GROUPS) + tl.arange(0, GROUPS)
    half = tl.reshape(halfwords(group, k0, k1, s0, s1, s2 + row.to(tl.int32)), (BUCKETS, BUCKET))
    floor = floor_small(scaled)
    up = unit_dither(half, scaled) < scaled - floor
    level = floor + up.to(tl.float32)
    if HAS_OUT:
        step, lowered = _step(largest, num_levels)
        lost = p - _decoded(level, step[:, None], lowered[:, None])
        store_block(out + base, at, lost, count, whole)
    symbol = tl.where(at < count, level.to(tl.int32) + num_levels, 0)
    store_packed(
        packed + row * num_bytes,
        tl.reshape(symbol, (GROUPS, 8)),
        group,
        num_bytes,
        whole,
        WIDTH,
        WIDE,
        BYTES,
    )


@triton.jit
def _decode(
    packed,
    scale,
    out,
    highest,
    count,
    bucket,
    num_levels,
    WIDTH: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    FUSED: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """The tile of `_levels`."""
    start = program_start(BUCKETS * BUCKET)
    whole = start + BUCKETS * BUCKET <= count
    b = program_start(BUCKETS) + tl.arange(0, BUCKETS)
    at = b[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    mask = at < count
    symbol = tl.where(mask, unpack_symbol(packed, at, mask, WIDTH, 0, 0), 0)
    if CHECKED:
        tl.atomic_max(highest, tl.max(tl.max(symbol, axis=1), axis=0))
    mine = b
    if not FUSED:
        mine = (b.to(tl.uint32) // uint32(bucket // 8)).to(tl.int64)
    largest = tl.load(scale + mine, mask=b * BUCKET < count, other=0)
    step, lowered = _step(largest, num_levels)
    level = (symbol - num_levels).to(tl.float32)
    value = _decoded(level, step[:, None], lowered[:, None])
    store_block(out, at, value, count, whole)
