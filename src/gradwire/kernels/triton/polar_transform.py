"""x = u F^(n) on words of 8 to 64 blocks side by side: a position is a word, n of them a group.

As in hadamard.py: up to 4096 positions in one program, then passes over what lies further apart.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._butterflies import transformed
from gradwire.kernels.triton._common import cdiv, launch, program_start

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_PIECE = 4096  # neighbours in one program
_LEAST = 1024  # words of a program: several short groups
_RADIX, _COLUMNS = 16, 128  # of a pass over a long group
_WARPS = 8


def polar_transform(bits: Tensor) -> Tensor:
    groups, n, width = bits.shape
    x = bits.contiguous()
    if x.data_ptr() % width:
        x = x.clone()
    x = x.view(_WORDS[width])
    out = torch.empty_like(x)
    piece = min(n, _PIECE)
    tile = max(piece, _LEAST)
    launch(
        _pieces,
        (cdiv(x.numel(), tile),),
        x,
        out,
        x.numel(),
        TILE=tile,
        STAGES=piece.bit_length() - 1,
        num_warps=_WARPS,
    )
    h = piece
    while h < n:
        radix = min(_RADIX, n // h)
        launch(
            _columns,
            (x.numel() // (radix * _COLUMNS),),
            out,
            h,
            RADIX=radix,
            STAGES=radix.bit_length() - 1,
            COLUMNS=_COLUMNS,
        )
        h *= radix
    return out.view(torch.uint8).view(groups, n, width)


@triton.jit
def _wide(x):
    """Of 32 bits at least."""
    if x.dtype != tl.int64:
        x = x.to(tl.int32)
    return x


@triton.jit
def _pieces(words, out, count, TILE: tl.constexpr, STAGES: tl.constexpr):
    at = program_start(TILE) + tl.arange(0, TILE)
    x = _wide(tl.load(words + at, mask=at < count, other=0))
    x = transformed(x, TILE, STAGES, 1, True)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _columns(out, h, RADIX: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr):
    first = program_start(COLUMNS)  # of all columns
    start = first // h * h * RADIX + first % h
    at = start + tl.arange(0, RADIX)[:, None].to(tl.int64) * h + tl.arange(0, COLUMNS)[None, :]
    x = tl.reshape(_wide(tl.load(out + at)), (RADIX * COLUMNS,))
    x = tl.reshape(transformed(x, RADIX * COLUMNS, STAGES, COLUMNS, True), (RADIX, COLUMNS))
    tl.store(out + at, x.to(out.dtype.element_ty))
