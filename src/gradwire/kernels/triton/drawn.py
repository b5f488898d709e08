"""Elements kept at random in proportion to their magnitude: a pass that marks the candidates, and
one over them that draws their half words again."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._candidates import TILE_WORDS
from gradwire.kernels.triton._common import (
    KEY_WORDS,
    cdiv,
    halfwords,
    key_words,
    launch,
    load_block,
    philox,
    program_start,
)
from gradwire.kernels.triton.selection import collect_marked

_TILE = 32 * TILE_WORDS
_CHUNK = 1024  # candidates of a program


def draw_candidates(
    x: Tensor, factor: float, seed: int, stream: tuple[int, int, int], capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    x, words = x.contiguous(), key_words(seed, stream)
    tiles = cdiv(x.numel(), _TILE)
    marks = torch.empty(tiles * (TILE_WORDS + 1), dtype=torch.int32, device=x.device)
    launch(_mark, (tiles,), x, marks, x.numel(), float(factor), *words, WORDS=TILE_WORDS)
    indices, values = collect_marked(x, None, marks, capacity)
    halves = torch.empty(len(indices), dtype=torch.int32, device=x.device)
    grid = (max(1, cdiv(len(indices), _CHUNK)),)
    launch(_halves, grid, indices, halves, len(indices), *words, CHUNK=_CHUNK)
    return indices, values, halves


@triton.jit(do_not_specialize=["n", *KEY_WORDS])
def _mark(x, marks, n, factor, k0, k1, s0, s1, s2, WORDS: tl.constexpr):
    first = program_start(32 * WORDS)
    byte = tl.arange(0, 4 * WORDS)
    column = tl.arange(0, 8)[None, :]
    drawn = halfwords(first // 8 + byte, k0, k1, s0, s1, s2)  # [4 WORDS, 8]
    at = first + 8 * byte[:, None] + column
    magnitude = tl.abs(load_block(x, at, n, first + 32 * WORDS <= n))
    hit = (magnitude * factor + 1.0 >= drawn.to(tl.float32)) & (at < n)
    bits = tl.reshape(hit.to(tl.int32) << column, (WORDS, 4, 8))
    words = tl.sum(tl.sum(bits, axis=2) << (8 * tl.arange(0, 4)[None, :]), axis=1)
    tl.store(marks + first // 32 + tl.arange(0, WORDS), words)
    counts = marks + tl.num_programs(0).to(tl.int64) * WORDS
    tl.store(counts + tl.program_id(0), tl.sum(tl.sum(hit.to(tl.int32), axis=1)))


@triton.jit(do_not_specialize=["count", *KEY_WORDS])
def _halves(indices, halves, count, k0, k1, s0, s1, s2, CHUNK: tl.constexpr):
    place = program_start(CHUNK) + tl.arange(0, CHUNK)
    at = tl.load(indices + place, mask=place < count, other=0)
    w0, w1, w2, w3 = philox(at // 8, k0, k1, s0, s1, s2)
    which = (at % 8) // 2
    word = tl.where(which < 2, tl.where(which < 1, w0, w1), tl.where(which < 3, w2, w3))
    half = ((word >> (16 * (at % 2)).to(tl.uint32)) & 0xFFFF).to(tl.int32)
    tl.store(halves + place, half, mask=place < count)
