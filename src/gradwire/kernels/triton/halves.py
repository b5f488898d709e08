"""float32 to a 16-bit float, and means of 16-bit floats."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import (
    cdiv,
    halves_as_bits,
    launch,
    load_block,
    narrowed,
    program_start,
    store_block,
    widened,
)

_TILE = 4096  # elements of a program
_ADDED = 4  # vectors that one launch adds up
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float16, torch.bfloat16)}


def narrow(x: Tensor, out: Tensor) -> None:
    """Saturating; NaN where x is not finite. Nobody waits to see whether it was."""
    x = x.contiguous()
    _launch_narrow(x, x, out, x, False)


def narrow_sum(x: Tensor, residual: Tensor, out: Tensor, lost: Tensor) -> None:
    """`narrow` of x + residual; what is lost of it into `lost`."""
    _launch_narrow(x.contiguous(), residual.contiguous(), out, lost, True)


def _launch_narrow(x: Tensor, residual: Tensor, out: Tensor, lost: Tensor, fed: bool) -> None:
    count = x.numel()
    launch(
        _narrow,
        (cdiv(count, _TILE),),
        x,
        residual,
        halves_as_bits(out),
        lost,
        count,
        LARGEST=_LARGEST[out.dtype],
        FED=fed,
        BLOCK=_TILE,
    )


def mean_halves(pieces: Sequence[Tensor], count: int, out: Tensor) -> Tensor:
    """Added in order in float32, and rounded once."""
    numel, flat = out.numel(), halves_as_bits(out.view(-1))
    pieces = [halves_as_bits(piece.contiguous()) for piece in pieces]
    many = len(pieces) > _ADDED
    total = torch.empty(numel, dtype=torch.float32, device=out.device) if many else flat
    for first in range(0, len(pieces), _ADDED):
        some = pieces[first : first + _ADDED]
        is_last = first + len(some) == len(pieces)
        launch(
            _add,
            (cdiv(numel, _TILE),),
            *some,
            *some[:1] * (_ADDED - len(some)),
            total,
            flat,
            numel,
            count,
            NUMBER=len(some),
            IS_FIRST=first == 0,
            IS_LAST=is_last,
            BLOCK=_TILE,
        )
    return out


@triton.jit
def _narrow(
    x,
    residual,
    out,
    lost,
    count,
    LARGEST: tl.constexpr,
    FED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = program_start(BLOCK)
    at = start + tl.arange(0, BLOCK)
    whole = start + BLOCK <= count
    total = load_block(x, at, count, whole)
    if FED:
        total = total + load_block(residual, at, count, whole)
    finite = (total.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
    value = tl.where(total > LARGEST, LARGEST, tl.where(total < -LARGEST, -LARGEST, total))
    half = narrowed(tl.where(finite, value, float("nan")), out.dtype.element_ty)
    store_block(out, at, half, count, whole)
    if FED:
        store_block(lost, at, total - widened(half), count, whole)


@triton.jit
def _add(
    x0,
    x1,
    x2,
    x3,
    total,
    out,
    count,
    divisor,
    NUMBER: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = program_start(BLOCK)
    at = start + tl.arange(0, BLOCK)
    whole = start + BLOCK <= count
    value = widened(load_block(x0, at, count, whole))
    if not IS_FIRST:
        value = load_block(total, at, count, whole) + value
    if NUMBER > 1:
        value = value + widened(load_block(x1, at, count, whole))
    if NUMBER > 2:
        value = value + widened(load_block(x2, at, count, whole))
    if NUMBER > 3:
        value = value + widened(load_block(x3, at, count, whole))
    if IS_LAST:
        value = tl.div_rn(value, tl.zeros_like(value) + divisor)
        store_block(out, at, narrowed(value, out.dtype.element_ty), count, whole)
    else:
        store_block(total, at, value, count, whole)
