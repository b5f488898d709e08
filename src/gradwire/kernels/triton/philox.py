"""Philox 4x32-10: a program draws blocks of four words."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import (
    KEY_WORDS,
    cdiv,
    key_words,
    launch,
    philox,
    program_start,
    signed,
)

_BLOCKS = 1024  # of a program


def philox_words(
    seed: int, stream: tuple[int, int, int], count: int, device: torch.device, first_block: int = 0
) -> Tensor:
    out = torch.empty(count, dtype=torch.int32, device=device)
    grid = (cdiv(count, 4 * _BLOCKS),)
    launch(_words, grid, out, count, signed(first_block), *key_words(seed, stream), BLOCKS=_BLOCKS)
    return out


@triton.jit(do_not_specialize=["first_block", *KEY_WORDS])
def _words(out, count, first_block, k0, k1, s0, s1, s2, BLOCKS: tl.constexpr):
    block = program_start(BLOCKS) + tl.arange(0, BLOCKS)
    w0, w1, w2, w3 = philox(block + first_block, k0, k1, s0, s1, s2)
    column = tl.arange(0, 4)[None, :]
    words = tl.where(
        column < 2,
        tl.where(column < 1, w0[:, None], w1[:, None]),
        tl.where(column < 3, w2[:, None], w3[:, None]),
    )
    at = 4 * block[:, None] + column
    tl.store(out + at, words.to(tl.int32, bitcast=True), mask=at < count)
