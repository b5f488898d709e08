"""Means of what packed signs decode to: of each byte eight elements."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import (
    cdiv,
    launch,
    load_block,
    program_start,
    store_block,
    uint32,
)
from gradwire.kernels.triton._sign_kernels import scales_at

_TILE = 4096  # elements of a program
_MEANS = 4  # payloads that one launch adds up


def mean_signs(
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    count: int,
    bucket: int,
    out: Tensor | None,
) -> Tensor:
    if out is None:
        out = torch.empty(count, dtype=torch.float32, device=packed[0].device)
    packed, scale = [bits.contiguous() for bits in packed], [each.contiguous() for each in scale]
    for first in range(0, len(packed), _MEANS):
        some = list(zip(packed, scale))[first : first + _MEANS]
        padded = some + some[:1] * (_MEANS - len(some))
        launch(
            _add_signs,
            (cdiv(count, _TILE),),
            *(tensor for pair in padded for tensor in pair),
            out,
            count,
            bucket // 8,
            len(packed),
            **_options(first, len(some), len(packed), bucket >= count),
        )
    return out


def mean_signs_in(
    buffers: Sequence[Tensor],
    scale_at: int,
    packed_at: int,
    count: int,
    bucket: int,
    out: Tensor | None,
) -> Tensor:
    if out is None:
        out = torch.empty(count, dtype=torch.float32, device=buffers[0].device)
    grid, bucket_bytes, number = (cdiv(count, _TILE),), bucket // 8, len(buffers)
    for first in range(0, number, _MEANS):
        some = buffers[first : first + _MEANS]
        padded = (*some, *(some[0] for _ in range(_MEANS - len(some))))
        how = _options(first, len(some), number, bucket >= count)
        given = *padded, out, count, bucket_bytes, number, scale_at, packed_at
        launch(_add_in_buffers, grid, *given, **how)
    return out


@lru_cache(maxsize=256)
def _options(first: int, some: int, number: int, single: bool) -> dict[str, int | bool]:
    """Constants of the launch that adds up `some` of `number` payloads, from the `first` on."""
    return {
        "NUMBER": some,
        "IS_FIRST": first == 0,
        "DIVIDES": number > 1 and first + some == number,
        "SINGLE": single,
        "BLOCK": _TILE,
    }


@triton.jit
def _one_sign(packed, scale, byte, mask, bucket_bytes, SINGLE: tl.constexpr):
    """What bytes decode to: [bytes, 8]."""
    bits = tl.load(packed + byte, mask=mask, other=0).to(tl.int32)
    if SINGLE:
        s = tl.load(scale)
    else:
        # 32 bits divide much faster, and number the bytes of 32 billion elements.
        b = byte.to(tl.uint32) // uint32(bucket_bytes)
        s = tl.load(scale + b, mask=mask, other=0)[:, None]
    is_minus = ((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0
    return tl.where(is_minus, -s, s)


@triton.jit
def _add(
    packed0,
    scale0,
    packed1,
    scale1,
    packed2,
    scale2,
    packed3,
    scale3,
    out,
    count,
    bucket_bytes,
    divisor,
    NUMBER: tl.constexpr,
    IS_FIRST: tl.constexpr,
    DIVIDES: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds what up to four payloads decode to, in order; the last launch divides."""
    start = program_start(BLOCK)
    byte = program_start(BLOCK // 8) + tl.arange(0, BLOCK // 8)
    at = 8 * byte[:, None] + tl.arange(0, 8)[None, :]
    mask = 8 * byte < count
    whole = start + BLOCK <= count
    total = _one_sign(packed0, scale0, byte, mask, bucket_bytes, SINGLE)
    if not IS_FIRST:
        total = load_block(out, at, count, whole) + total
    if NUMBER > 1:
        total = total + _one_sign(packed1, scale1, byte, mask, bucket_bytes, SINGLE)
    if NUMBER > 2:
        total = total + _one_sign(packed2, scale2, byte, mask, bucket_bytes, SINGLE)
    if NUMBER > 3:
        total = total + _one_sign(packed3, scale3, byte, mask, bucket_bytes, SINGLE)
    if DIVIDES:
        total = tl.div_rn(total, tl.zeros_like(total) + divisor)
    store_block(out, at, total, count, whole)


@triton.jit
def _add_signs(
    packed0,
    scale0,
    packed1,
    scale1,
    packed2,
    scale2,
    packed3,
    scale3,
    out,
    count,
    bucket_bytes,
    divisor,
    NUMBER: tl.constexpr,
    IS_FIRST: tl.constexpr,
    DIVIDES: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _add(
        packed0, scale0, packed1, scale1, packed2, scale2, packed3, scale3,
        out, count, bucket_bytes, divisor, NUMBER, IS_FIRST, DIVIDES, SINGLE, BLOCK,
    )  # fmt: skip


@triton.jit
def _add_in_buffers(
    buffer0,
    buffer1,
    buffer2,
    buffer3,
    out,
    count,
    bucket_bytes,
    divisor,
    scale_at,
    packed_at,
    NUMBER: tl.constexpr,
    IS_FIRST: tl.constexpr,
    DIVIDES: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scales and signs lie at the same places of all buffers."""
    _add(
        buffer0 + packed_at, scales_at(buffer0, scale_at),
        buffer1 + packed_at, scales_at(buffer1, scale_at),
        buffer2 + packed_at, scales_at(buffer2, scale_at),
        buffer3 + packed_at, scales_at(buffer3, scale_at),
        out, count, bucket_bytes, divisor, NUMBER, IS_FIRST, DIVIDES, SINGLE, BLOCK,
    )  # fmt: skip
