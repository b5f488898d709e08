"""The fast Walsh-Hadamard transform: a program transforms whole rows, or a piece of a long one.

Pieces of up to 4096 neighbours lie in the registers of one program. Longer rows take more passes,
in each of which a program combines up to 16 elements that lie 4096, 65536, ... apart. Butterflies
come in the reference's order, and so do the sums of norms, so the bits are the same. Random signs,
bits and scales in one pass are in rotated_signs.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference import hadamard as reference
from gradwire.kernels.reference.bits import pack_uints, unpack_uints
from gradwire.kernels.triton._butterflies import merged_bits, norms, transformed
from gradwire.kernels.triton._common import cdiv, fold, launch, power_of_two, program_start
from gradwire.kernels.triton.rotated_signs import encode_rotated_signs as encode_rotated_signs

_PIECE = 4096  # neighbours in one program
_LEAST = reference.LEAST_TILE  # elements of a program: several short rows
_RADIX, _COLUMNS = 16, 128  # of a pass over a long row
_LONGEST_NORM = _RADIX * _PIECE
_WARPS = 4


def hadamard(
    x: Tensor, before: Tensor | None, after: Tensor | None, out: Tensor | None = None
) -> Tensor:
    x = x.contiguous()
    n = x.shape[1]
    out = torch.empty_like(x) if out is None else out
    piece = min(n, _PIECE)
    tile = max(piece, _LEAST)
    launch(
        _pieces,
        (cdiv(x.numel(), tile),),
        x,
        before,
        after if n == piece else None,
        out,
        x.numel(),
        TILE=tile,
        PIECE=piece,
        STAGES=piece.bit_length() - 1,
        FACTOR=reference.factor(n),
        num_warps=_WARPS,
    )
    h = piece
    while h < n:
        radix = min(_RADIX, n // h)
        launch(
            _columns,
            (x.numel() // (radix * _COLUMNS),),
            out,
            after if h * radix == n else None,
            h,
            RADIX=radix,
            STAGES=radix.bit_length() - 1,
            COLUMNS=_COLUMNS,
        )
        h *= radix
    return out


def rotated_signs(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, n = x.shape
    if n < 8:  # rows that begin within a byte
        return reference.rotated_signs(x, before)
    if n > _PIECE:
        y = hadamard(x, before, None)
        return pack_uints((y >= 0).reshape(-1), 1), *row_norms(y)
    x, tile = x.contiguous(), max(n, _LEAST)
    packed = torch.empty(x.numel() // 8, dtype=torch.uint8, device=x.device)
    sums = torch.empty(2, rows, dtype=torch.float64, device=x.device)
    launch(
        _signs,
        (cdiv(x.numel(), tile),),
        x,
        before,
        packed,
        sums,
        x.numel(),
        rows,
        TILE=tile,
        PIECE=n,
        STAGES=n.bit_length() - 1,
        FACTOR=reference.factor(n),
        num_warps=_WARPS,
    )
    return packed, sums[0], sums[1]


def unrotated_signs(
    packed: Tensor, scale: Tensor, n: int, after: Tensor, out: Tensor | None = None
) -> Tensor:
    count = len(scale) * n
    if n < 8 or n > _PIECE:
        signs = 2 * unpack_uints(packed, 1, count).reshape(-1, n) - 1
        return hadamard(signs * scale[:, None], None, after, out)
    if out is None:
        out = torch.empty(len(scale), n, dtype=scale.dtype, device=scale.device)
    tile = max(n, _LEAST)
    launch(
        _from_signs,
        (cdiv(count, tile),),
        packed,
        scale.contiguous(),
        after,
        out,
        count,
        TILE=tile,
        PIECE=n,
        STAGES=n.bit_length() - 1,
        FACTOR=reference.factor(n),
        num_warps=_WARPS,
    )
    return out


def row_norms(y: Tensor) -> tuple[Tensor, Tensor]:
    rows, n = y.shape
    size = power_of_two(n)
    if not 1 <= n <= _LONGEST_NORM:
        return reference.row_norms(y)
    y = y.contiguous()
    columns = min(size, _PIECE)
    block = min(columns, _COLUMNS)
    width = columns // block
    # [2, rows, width]: of |y| and of y^2, one sum for each column of `width`, a fold from the end.
    sums = torch.empty(2, rows, columns, dtype=torch.float64, device=y.device)
    launch(
        _fold_rows,
        (rows * width,),
        y,
        sums,
        rows,
        n,
        ROWS=size // columns,
        LEVELS=(size // columns).bit_length() - 1,
        SIZE=columns,
        COLUMNS=block,
    )
    if columns > 1:
        total = torch.empty(2, rows, dtype=torch.float64, device=y.device)
        launch(
            _fold_sums,
            (2 * rows,),
            sums,
            total,
            SIZE=columns,
            LEVELS=columns.bit_length() - 1,
        )
        return total[0], total[1]
    return sums[0, :, 0], sums[1, :, 0]


@triton.jit
def _signs_at(packed, at, count, dtype: tl.constexpr):
    """-1 where a bit is one, else 1."""
    byte = tl.load(packed + (at >> 3), mask=at < count, other=0)
    bit = (byte.to(tl.int32) >> (at & 7).to(tl.int32)) & 1
    return (1 - 2 * bit).to(dtype)


@triton.jit
def _pieces(
    x,
    before,
    after,
    out,
    count,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    at = program_start(TILE) + tl.arange(0, TILE)
    y = tl.load(x + at, mask=at < count, other=0)
    y = y * tl.full((1,), FACTOR, y.dtype)
    if before is not None:
        y = y * _signs_at(before, at, count, y.dtype)
    y = transformed(y, TILE, STAGES, 1)
    if after is not None:
        y = y * _signs_at(after, at, count, y.dtype)
    tl.store(out + at, y, mask=at < count)


@triton.jit
def _columns(out, after, h, RADIX: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr):
    first = program_start(COLUMNS)  # of all columns
    start = first // h * h * RADIX + first % h
    at = start + tl.arange(0, RADIX)[:, None].to(tl.int64) * h + tl.arange(0, COLUMNS)[None, :]
    y = tl.reshape(tl.load(out + at), (RADIX * COLUMNS,))
    y = tl.reshape(transformed(y, RADIX * COLUMNS, STAGES, COLUMNS), (RADIX, COLUMNS))
    if after is not None:
        byte = tl.load(after + (at >> 3))
        bit = (byte.to(tl.int32) >> (at & 7).to(tl.int32)) & 1
        y = y * (1 - 2 * bit).to(y.dtype)
    tl.store(out + at, y)


@triton.jit
def _signs(
    x,
    before,
    packed,
    sums,
    count,
    rows,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    start = program_start(TILE)
    at = start + tl.arange(0, TILE)
    y = tl.load(x + at, mask=at < count, other=0)
    y = y * tl.full((1,), FACTOR, y.dtype) * _signs_at(before, at, count, y.dtype)
    y = transformed(y, TILE, STAGES, 1)
    bits = merged_bits((y >= 0).to(tl.int32), TILE, 1, 3)
    byte = start // 8 + tl.arange(0, TILE // 8)
    tl.store(packed + byte, bits.to(tl.uint8), mask=byte < count // 8)
    total, squares = norms(y, TILE // PIECE, PIECE, STAGES)
    row = start // PIECE + tl.arange(0, TILE // PIECE)
    tl.store(sums + row, total, mask=row < rows)
    tl.store(sums + rows + row, squares, mask=row < rows)


@triton.jit
def _from_signs(
    packed,
    scale,
    after,
    out,
    count,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    at = program_start(TILE) + tl.arange(0, TILE)
    y = tl.load(scale + at // PIECE, mask=at < count, other=0)
    y = y * _signs_at(packed, at, count, y.dtype) * tl.full((1,), -FACTOR, y.dtype)
    y = transformed(y, TILE, STAGES, 1) * _signs_at(after, at, count, y.dtype)
    tl.store(out + at, y, mask=at < count)


@triton.jit
def _fold_rows(
    y,
    sums,
    rows,
    n,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds what lies SIZE, 2 SIZE, ... apart in a row of ROWS x SIZE, of which n are there."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // (SIZE // COLUMNS), program % (SIZE // COLUMNS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at = tl.arange(0, ROWS)[:, None] * SIZE + column
    size = tl.abs(tl.load(y + row * n + at, mask=at < n, other=0)).to(tl.float64)
    square = size * size
    for level in tl.static_range(LEVELS):
        size = tl.sum(tl.reshape(size, (2, ROWS >> (level + 1), COLUMNS)), axis=0)
        square = tl.sum(tl.reshape(square, (2, ROWS >> (level + 1), COLUMNS)), axis=0)
    to = sums + row * SIZE + column
    tl.store(to, tl.reshape(size, (1, COLUMNS)))
    tl.store(to + rows * SIZE, tl.reshape(square, (1, COLUMNS)))


@triton.jit
def _fold_sums(sums, total, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(sums + row * SIZE + tl.arange(0, SIZE))
    tl.store(total + row + tl.arange(0, 1), fold(x, 1, SIZE, LEVELS))
