"""One random element of each of k equal strata: a program draws blocks of four words."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import KEY_WORDS, cdiv, key_words, launch, philox

BLOCKS = 256  # of a program


def strata_positions(
    numel: int, count: int, seed: int, stream: tuple[int, int, int], device: torch.device
) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=device)
    grid = (cdiv(count, 4 * BLOCKS),)
    launch(_positions, grid, out, numel, count, *key_words(seed, stream), BLOCKS=BLOCKS)
    return out


def strata_values(
    x: Tensor, count: int, seed: int, stream: tuple[int, int, int], scaled: bool
) -> Tensor:
    x = x.contiguous()
    out = torch.empty(count, dtype=torch.float32, device=x.device)
    grid = (cdiv(count, 4 * BLOCKS),)
    words = key_words(seed, stream)
    launch(_values, grid, x, out, x.numel(), count, *words, SCALED=scaled, BLOCKS=BLOCKS)
    return out


@triton.jit
def strata_block(numel, count, k0, k1, s0, s1, s2, BLOCKS: tl.constexpr):
    """Numbers of a program's strata, a position in each, and their sizes: int64 [BLOCKS, 4]."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    w0, w1, w2, w3 = philox(block, k0, k1, s0, s1, s2)
    column = tl.arange(0, 4)[None, :]
    word = tl.where(
        column < 2,
        tl.where(column < 1, w0[:, None], w1[:, None]),
        tl.where(column < 3, w2[:, None], w3[:, None]),
    ).to(tl.int64)
    stratum = 4 * block[:, None] + column
    first = stratum * numel // count
    size = (stratum + 1) * numel // count - first
    return stratum, first + ((word * size) >> 32), size


@triton.jit(do_not_specialize=["numel", "count", *KEY_WORDS])
def _positions(out, numel, count, k0, k1, s0, s1, s2, BLOCKS: tl.constexpr):
    stratum, at, _size = strata_block(numel, count, k0, k1, s0, s1, s2, BLOCKS)
    tl.store(out + stratum, at, mask=stratum < count)


@triton.jit(do_not_specialize=["numel", "count", *KEY_WORDS])
def _values(x, out, numel, count, k0, k1, s0, s1, s2, SCALED: tl.constexpr, BLOCKS: tl.constexpr):
    stratum, at, size = strata_block(numel, count, k0, k1, s0, s1, s2, BLOCKS)
    values = tl.load(x + at, mask=stratum < count, other=0)
    if SCALED:
        values = values * size.to(tl.float32)
    tl.store(out + stratum, values, mask=stratum < count)
