"""Butterflies and folds of a tile whose other half of a pair is in the same thread.

`tl.split` takes pairs apart along the last axis, which makes the compiler give a thread both of
them, and up to five stages are done on one such axis of up to 32 elements: moving its first
dimension to the front after each brings the axis back in order. So elements move between threads
once for five stages, and not at all within them. Sums are along the tree of `fold`.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton._common import fold


@triton.jit
def transformed(
    y, TILE: tl.constexpr, STAGES: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr = False
):
    """Butterflies (a, b) -> (a + b, a - b) between elements H, 2 H, 4 H ... apart.

    BITS: (a, b) -> (a xor b, b), of whole numbers.
    """
    if STAGES > 10:
        y = _stages(y, TILE, 5, H, BITS)
        y = _stages(y, TILE, 5, H << 5, BITS)
        y = _stages(y, TILE, STAGES - 10, H << 10, BITS)
    elif STAGES > 5:
        y = _stages(y, TILE, 5, H, BITS)
        y = _stages(y, TILE, STAGES - 5, H << 5, BITS)
    elif STAGES > 0:
        y = _stages(y, TILE, STAGES, H, BITS)
    return y


@triton.jit
def _stages(y, TILE: tl.constexpr, STAGES: tl.constexpr, H: tl.constexpr, BITS: tl.constexpr):
    N: tl.constexpr = 1 << STAGES
    y = tl.permute(tl.reshape(y, (TILE // (N * H), N, H)), (0, 2, 1))
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(y, (TILE // N, N // 2, 2)))
        if BITS:
            y = tl.join(a ^ b, b)
        else:
            y = tl.join(a + b, a - b)
        y = tl.permute(y, (0, 2, 1))
    y = tl.permute(tl.reshape(y, (TILE // (N * H), H, N)), (0, 2, 1))
    return tl.reshape(y, (TILE,))


@triton.jit
def fold_halves(x, ROWS: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """The first LEVELS additions of `fold` in rows of SIZE: [ROWS * (SIZE >> LEVELS)]."""
    N: tl.constexpr = 1 << LEVELS
    x = tl.permute(tl.reshape(x, (ROWS, N, SIZE // N)), (0, 2, 1))
    for level in tl.static_range(LEVELS):
        pairs = tl.reshape(x, (ROWS * SIZE // N, 2, N >> (level + 1)))
        a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
        x = a + b
    return tl.reshape(x, (ROWS * SIZE // N,))


@triton.jit
def fold_rows(x, ROWS: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """`fold`, the first levels of which are within a thread."""
    FIRST: tl.constexpr = 5 if LEVELS > 5 else LEVELS
    x = fold_halves(x, ROWS, SIZE, FIRST)
    return fold(x, ROWS, SIZE >> FIRST, LEVELS - FIRST)


@triton.jit
def norms(y, ROWS: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr):
    """Sums of |y| and of y^2 over rows of SIZE = 2^STAGES, float64 [ROWS] each."""
    FIRST: tl.constexpr = 7 if STAGES > 7 else STAGES  # of each alone, then of both together
    LEFT: tl.constexpr = SIZE >> FIRST
    size = tl.abs(y).to(tl.float64)
    sums = fold_halves(size, ROWS, SIZE, FIRST)
    squares = fold_halves(size * size, ROWS, SIZE, FIRST)
    both = tl.reshape(tl.permute(tl.join(sums, squares), (1, 0)), (2 * ROWS * LEFT,))
    both = fold(both, 2 * ROWS, LEFT, STAGES - FIRST)
    return tl.split(tl.permute(tl.reshape(both, (2, ROWS)), (1, 0)))


@triton.jit
def merged_bits(bits, SIZE: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """Words of WIDTH bits, int32 [SIZE], as words of WIDTH << LEVELS, the first one lowest."""
    for level in tl.static_range(LEVELS):
        low, high = tl.split(tl.reshape(bits, (SIZE >> (level + 1), 2)))
        bits = low | (high << (WIDTH << level))
    return bits
