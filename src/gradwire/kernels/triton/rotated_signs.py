"""`rotated_signs` from keys to scales in one pass: draws, rows, and what fills no row.

A program transforms a tile of whole rows in registers. The last elements, which fill no row, mix
with those before them first, and some of what comes out goes to the last row: the program of the
last tile does that, and moves them through memory. Whether x must be brought into range is known
when the largest magnitude is, so a second kernel looks at those of all tiles, and encodes again if
it must. So nobody waits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference import hadamard as reference
from gradwire.kernels.triton._butterflies import merged_bits, norms, transformed
from gradwire.kernels.triton._common import KEY_WORDS, cdiv, key_words, launch, philox, signed

_MOST_AGAIN = 256  # programs of the second kernel, which mostly ends at once
_WARPS = 4
_OTHER_WORDS = ["e0", "e1", "e2"]


def encode_rotated_signs(
    x: Tensor,
    n: int,
    seed: int,
    streams: tuple[tuple[int, int, int], tuple[int, int, int]],
    unbiased: bool,
    exponents: tuple[int, int],
    into: tuple[Tensor, Tensor],
) -> Tensor:
    scale, packed = into
    rest, tile = x.numel() % n, reference.tile_length(n)
    num_tiles = cdiv(x.numel() - rest, tile)
    # [num_tiles], and room for one row
    memory = torch.empty(num_tiles + n, dtype=torch.float32, device=x.device)
    given = (
        x.contiguous(),
        scale,
        packed,
        memory,
        x.numel(),
        rest,
        num_tiles,
        *key_words(seed, streams[0]),
        *map(signed, streams[1]),
    )
    how = {
        "LOW": exponents[0],
        "HIGH": exponents[1],
        "UNBIASED": unbiased,
        "WIDE": packed.data_ptr() % 4 == 0,
        "TILE": tile,
        "PIECE": n,
        "STAGES": n.bit_length() - 1,
        "FACTOR": reference.factor(n),
        "num_warps": _WARPS,
    }
    launch(_encode, (num_tiles,), *given, **how)
    launch(_encode_again, (min(num_tiles, _MOST_AGAIN),), *given, **how)
    return memory[:num_tiles]


@triton.jit(do_not_specialize=["count", "rest", "num_tiles", *KEY_WORDS, *_OTHER_WORDS])
def _encode(
    x,
    scale,
    packed,
    memory,
    count,
    rest,
    num_tiles,
    k0,
    k1,
    s0,
    s1,
    s2,
    e0,
    e1,
    e2,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    UNBIASED: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    tile = num_tiles - 1 - tl.program_id(0)  # the last one takes longest
    _tile(
        tile,
        x,
        scale,
        packed,
        memory,
        count,
        rest,
        num_tiles,
        k0,
        k1,
        s0,
        s1,
        s2,
        e0,
        e1,
        e2,
        0,
        False,
        UNBIASED,
        WIDE,
        TILE,
        PIECE,
        STAGES,
        FACTOR,
    )


@triton.jit(do_not_specialize=["count", "rest", "num_tiles", *KEY_WORDS, *_OTHER_WORDS])
def _encode_again(
    x,
    scale,
    packed,
    memory,
    count,
    rest,
    num_tiles,
    k0,
    k1,
    s0,
    s1,
    s2,
    e0,
    e1,
    e2,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    UNBIASED: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    shift = _shift(memory, num_tiles, LOW, HIGH)
    if shift != 0:
        for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            _tile(
                tile,
                x,
                scale,
                packed,
                memory,
                count,
                rest,
                num_tiles,
                k0,
                k1,
                s0,
                s1,
                s2,
                e0,
                e1,
                e2,
                shift,
                True,
                UNBIASED,
                WIDE,
                TILE,
                PIECE,
                STAGES,
                FACTOR,
            )


@triton.jit
def _tile(
    tile,
    x,
    scale,
    packed,
    memory,
    count,
    rest,
    num_tiles,
    k0,
    k1,
    s0,
    s1,
    s2,
    e0,
    e1,
    e2,
    shift,
    AGAIN: tl.constexpr,
    UNBIASED: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Bits and scales of a tile; with the last one those of the rest."""
    ROWS: tl.constexpr = TILE // PIECE
    start, whole = _wide(tile) * TILE, count - rest
    place = tl.arange(0, TILE)
    at = start + place
    edge = tl.where(rest > 0, whole - PIECE + rest, whole)  # from here on rows have what was mixed
    is_plain = start + TILE <= edge
    largest = 0
    across = memory + num_tiles
    if (not is_plain) & (rest > 0):
        mixed = tl.load(x + (count - PIECE) + place, mask=place < PIECE, other=0.0)
        mixed = _scaled(mixed, shift, AGAIN)
        largest = _largest(mixed)
        flips = _flips(_wide(0), k0, k1, e0, e1, e2, TILE)
        mixed = transformed(_randomised(mixed, flips, TILE, FACTOR), TILE, STAGES, 1)
        tl.store(across + place, mixed, mask=place < PIECE)
        tl.debug_barrier()
        end = tl.load(across + (PIECE - rest) + place, mask=place < rest, other=0.0)
        bits = merged_bits(((end >= 0) & (place < rest)).to(tl.int32), TILE, 1, 3)
        byte = tl.arange(0, TILE // 8)
        tl.store(packed + whole // 8 + byte, bits.to(tl.uint8), mask=byte < (rest + 7) // 8)
        row = tl.arange(0, ROWS)
        value = _scale(end, rest, shift, AGAIN, UNBIASED, ROWS, PIECE, STAGES)
        tl.store(scale + whole // PIECE + row, value, mask=row < 1)
    if is_plain:
        y = _scaled(tl.load(x + at), shift, AGAIN)
        largest = _largest(y)
    else:
        y = _scaled(tl.load(x + at, mask=at < edge, other=0.0), shift, AGAIN)
        largest = tl.maximum(largest, _largest(y))
        moved = tl.load(across + (at - edge), mask=(at >= edge) & (at < whole), other=0.0)
        y = tl.where(at < edge, y, moved)
    flips = _flips(start // 128, k0, k1, s0, s1, s2, TILE)
    y = transformed(_randomised(y, flips, TILE, FACTOR), TILE, STAGES, 1)
    bits = merged_bits((y >= 0).to(tl.int32), TILE, 1, 3)
    if WIDE & is_plain:
        word = start // 32 + tl.arange(0, TILE // 32)
        tl.store(packed.to(tl.pointer_type(tl.int32)) + word, merged_bits(bits, TILE // 8, 8, 2))
    else:
        byte = start // 8 + tl.arange(0, TILE // 8)
        tl.store(packed + byte, bits.to(tl.uint8), mask=byte < whole // 8)
    row = start // PIECE + tl.arange(0, ROWS)
    value = _scale(y, PIECE, shift, AGAIN, UNBIASED, ROWS, PIECE, STAGES)
    tl.store(scale + row, value, mask=row < whole // PIECE)
    if not AGAIN:
        tl.store(memory + tile, largest.to(tl.float32, bitcast=True))


@triton.jit
def _wide(number):
    """As int64; the interpreter counts with integers of Python."""
    return tl.full((), 0, tl.int64) + number


@triton.jit
def _flips(first, k0, k1, s0, s1, s2, TILE: tl.constexpr):
    """A bit for each element of a tile, int32 [TILE / 32], of blocks of Philox from `first` on."""
    block = first + tl.arange(0, TILE // 128)
    w0, w1, w2, w3 = philox(block, k0, k1, s0, s1, s2)
    words = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 2, 1))
    return tl.reshape(words, (TILE // 32,)).to(tl.int32, bitcast=True)


@triton.jit
def _randomised(y, words, TILE: tl.constexpr, FACTOR: tl.constexpr):
    """y times FACTOR, with the other sign where a bit is one."""
    y = tl.reshape(y * tl.full((1,), FACTOR, tl.float32), (TILE // 32, 32))
    sign = (words[:, None] << (31 - tl.arange(0, 32))[None, :]) & -2147483648
    y = (y.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    return tl.reshape(y, (TILE,))


@triton.jit
def _largest(y):
    """The bits of the largest magnitude: those of infinity and NaN are the largest of all."""
    return tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def _shift(largest, count, LOW: tl.constexpr, HIGH: tl.constexpr):
    """e, such that x times 2^-e has a largest magnitude of 2^(LOW - 1) .. 2^HIGH."""
    found = tl.zeros((1024,), tl.int32)
    for first in range(0, count, 1024):
        at = first + tl.arange(0, 1024)
        some = tl.load(largest + at, mask=at < count, other=0.0)
        found = tl.maximum(found, some.to(tl.int32, bitcast=True))
    bits = tl.max(found, axis=0)
    # Of subnormal numbers the bits are a whole number of 2^-149.
    normal, subnormal = bits, bits.to(tl.float32).to(tl.int32, bitcast=True)
    exponent = tl.where(bits < 0x800000, (subnormal >> 23) - 126 - 149, (normal >> 23) - 126)
    shift = exponent - tl.minimum(tl.maximum(exponent, LOW), HIGH)
    return tl.where((bits > 0) & (bits < 0x7F800000), shift, 0)


@triton.jit
def _scaled(x, shift, AGAIN: tl.constexpr):
    """x times 2^-shift, in two steps: that alone may be beyond the range."""
    if AGAIN:
        half = (-shift) >> 1
        one, two = tl.full((1,), 127, tl.int32) + half, tl.full((1,), 127, tl.int32) - shift - half
        x = x * (one << 23).to(tl.float32, bitcast=True) * (two << 23).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _scale(
    y,
    size,
    shift,
    AGAIN: tl.constexpr,
    UNBIASED: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The scales, float32 [ROWS], of rows of `size` elements and zeros."""
    sums, squares = norms(y, ROWS, PIECE, STAGES)
    one = tl.full((1,), 1, tl.float64)
    if UNBIASED:
        scale = squares / tl.where(sums > 0, sums, one)
    else:
        scale = sums / (tl.full((1,), 0, tl.float64) + size)
    if AGAIN:
        half = shift >> 1
        first = tl.full((1,), 1023, tl.int64) + half
        second = tl.full((1,), 1023, tl.int64) + shift - half
        scale = scale * (first << 52).to(tl.float64, bitcast=True)
        scale = scale * (second << 52).to(tl.float64, bitcast=True)
    most = one * 3.4028234663852886e38
    return tl.where(scale > most, most, scale).to(tl.float32)
