"""CRC-32 of memory on a device, as in reference/checksum.py.

A checksum is a polynomial over GF(2) modulo that of CRC-32, and of two pieces it is that of the
first times a power of x, plus that of the second. So words are multiplied and added along a tree.
Each program does one tile of words, whose lanes it adds up in turn; another kernel adds up the
tiles, and copies the first bytes, so that the host waits once for both. Tiles are counted from the
end: zeros in front change nothing, and of those behind there are at most 15, which are divided by.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference import checksum as reference
from gradwire.kernels.reference.checksum import power_of_x
from gradwire.kernels.triton._common import cdiv, launch, power_of_two, program_start, signed

_LANES = 1024
_TILE = 4 * _LANES  # words of a program: four for each lane, in turn
_JOINED = 256  # tiles that are added up in turn
_ONES = 0xFFFFFFFF
_POLYNOMIAL = tl.constexpr(signed(reference.POLYNOMIAL))


def crc32(x: Tensor, start: int, crc: int, head: int) -> tuple[int, bytes]:
    count = x.numel()
    head = min(head, count)
    if count - start < 4:  # too few for what is continued
        return reference.crc32(x, start, crc, head)
    words = cdiv(head, 4)
    quads = cdiv(count, 16)  # so programs load 16 bytes at once
    tiles = cdiv(4 * quads, _TILE)
    found = torch.empty(tiles, dtype=torch.int32, device=x.device)
    out = torch.empty(1 + words, dtype=torch.int32, device=x.device)
    # To continue is to add the complement to the first four bytes.
    low, high = _halves((crc ^ _ONES) << 8 * (start % 4))
    launch(
        _tiles,
        (tiles,),
        x,
        found,
        start,
        count,
        quads,
        low,
        high,
        TURN=_constant(32 * _LANES),
        STEP=_constant(32),
        LANES=_LANES,
        LEVELS=_LANES.bit_length() - 1,
    )
    launch(
        _join,
        (1,),
        found,
        x,
        out,
        count,
        tiles,
        cdiv(tiles, _JOINED),
        words,
        _constant(32 + 8 * (count - 16 * quads)),  # a checksum has a word of zeros behind
        TURN=_constant(32 * _TILE * _JOINED),
        STEP=_constant(32 * _TILE),
        LANES=_JOINED,
        LEVELS=_JOINED.bit_length() - 1,
        WORDS=power_of_two(words),
    )
    host = out.cpu().numpy().tobytes()
    return int.from_bytes(host[:4], "little") ^ _ONES, host[4 : 4 + head]


def _halves(number: int) -> tuple[int, int]:
    return signed(number & _ONES), signed(number >> 32)


def _constant(exponent: int) -> int:
    return signed(power_of_x(exponent))


@triton.jit
def _times(a, b):
    """Products of polynomials, int32; b is one for all."""
    product = tl.zeros_like(a)
    for power in tl.static_range(32):
        product = product ^ (((a << power) >> 31) & b)
        b = ((b >> 1) & 0x7FFFFFFF) ^ (tl.full((), _POLYNOMIAL, tl.int32) & (0 - (b & 1)))
    return product


@triton.jit
def _tree(value, step, LANES: tl.constexpr, LEVELS: tl.constexpr):
    """Adds up lanes that are `step` apart: [1]."""
    for level in tl.static_range(LEVELS):
        first, second = tl.split(tl.reshape(value, (LANES >> (level + 1), 2)))
        value = _times(first, step) ^ second
        step = _times(step, step)
    return tl.reshape(value, (1,))


@triton.jit
def _known_words(x, at, start, count, low, high):
    """Words of which some bytes may lie outside; what is continued is added to the first."""
    byte = 4 * at
    inside = (at >= 0) & (byte + 4 <= count)
    word = tl.load(x.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
    last = (at >= 0) & (byte + 4 > count)
    for k in tl.static_range(3):
        part = tl.load(x + byte + k, mask=last & (byte + k < count), other=0)
        word = word | (part.to(tl.int32) << (8 * k))
    before = tl.maximum(tl.minimum(start - byte, 4), 0).to(tl.int32)
    kept = tl.full((), -1, tl.int32) << (8 * tl.minimum(before, 3))
    word = word & tl.where(before > 3, 0, kept)
    word = word ^ tl.where(at == start // 4, low, 0)
    return word ^ tl.where(at == start // 4 + 1, high, 0)


@triton.jit(do_not_specialize=["start", "count", "quads", "low", "high"])
def _tiles(
    x,
    found,
    start,
    count,
    quads,
    low,
    high,
    TURN: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    first = 4 * (quads + LANES * (program_start(1) - tl.num_programs(0)))
    at = first + tl.arange(0, LANES)
    if (4 * first >= start + 8) & (4 * (first + 4 * LANES) <= count):
        words = x.to(tl.pointer_type(tl.int32)) + at
        w0 = tl.load(words)
        w1 = tl.load(words + LANES)
        w2 = tl.load(words + 2 * LANES)
        w3 = tl.load(words + 3 * LANES)
    else:
        w0 = _known_words(x, at, start, count, low, high)
        w1 = _known_words(x, at + LANES, start, count, low, high)
        w2 = _known_words(x, at + 2 * LANES, start, count, low, high)
        w3 = _known_words(x, at + 3 * LANES, start, count, low, high)
    turn = tl.full((), TURN, tl.int32)
    value = _times(_times(_times(w0, turn) ^ w1, turn) ^ w2, turn) ^ w3
    value = _tree(value, tl.full((), STEP, tl.int32), LANES, LEVELS)
    tl.store(found + program_start(1) + tl.arange(0, 1), value)


@triton.jit(do_not_specialize=["count", "tiles", "turns", "words", "factor"])
def _join(
    found,
    x,
    out,
    count,
    tiles,
    turns,
    words,
    factor,
    TURN: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
    LEVELS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """What the tiles come to, and behind it the first words of x."""
    value = tl.zeros((LANES,), tl.int32)
    for turn in range(turns):
        at = tiles + (turn - turns) * LANES + tl.arange(0, LANES)
        value = _times(value, tl.full((), TURN, tl.int32))
        value = value ^ tl.load(found + at, mask=at >= 0, other=0)
    value = _tree(value, tl.full((), STEP, tl.int32), LANES, LEVELS)
    tl.store(out + tl.arange(0, 1), _times(value, factor))
    at = tl.arange(0, WORDS)
    word = _known_words(x, at.to(tl.int64), 0, count, 0, 0)
    tl.store(out + 1 + at, word, mask=at < words)
