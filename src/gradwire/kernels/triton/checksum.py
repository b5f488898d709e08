"""CRC-32 of memory on a device, as in reference/checksum.py.

A checksum is a polynomial over GF(2) modulo that of CRC-32, and of two pieces it is that of the
first times a power of x, plus that of the second. Each lane of a program takes words of
a tile at equal distances, and multiplies what it has by one power of x before it adds the next;
four tables have that product of each byte. Then each lane is multiplied by the power
for its place, and lanes are added; another kernel does the same with the tiles, and copies the
first bytes, so that the host
waits once for both. Tiles are counted from the end: zeros in front change nothing, and of those
behind there are at most three, which are divided by.

Loops are not unrolled: code that runs once takes far longer to fetch than to run.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference import checksum as reference
from gradwire.kernels.reference.checksum import power_of_x, times
from gradwire.kernels.triton._common import cdiv, launch, power_of_two, program_start, signed

_LANES = 512  # of a program
_TILES = 512  # at most; all of them run at once
_BITS = 32
_ONES = 0xFFFFFFFF
_POLYNOMIAL = tl.constexpr(signed(reference.POLYNOMIAL))


def crc32(x: Tensor, start: int, crc: int, head: int) -> tuple[int, bytes]:
    count = x.numel()
    head = min(head, count)
    if count - start < 4:  # too few for what is continued
        return reference.crc32(x, start, crc, head)
    words, copied = cdiv(count, 4), cdiv(head, 4)
    turns = power_of_two(cdiv(words, _LANES * _TILES))
    tiles = cdiv(words, _LANES * turns)
    tables, places, weights = _constants(turns, _LANES, _TILES, x.device)
    found = torch.empty(tiles, dtype=torch.int32, device=x.device)
    out = torch.empty(1 + copied, dtype=torch.int32, device=x.device)
    # To continue is to add the complement to the first four bytes.
    low, high = _halves((crc ^ _ONES) << 8 * (start % 4))
    given = x, found, tables, places, start, count, words, turns, low, high, _BITS
    launch(_tiles, (tiles,), *given, LANES=_LANES, num_warps=_LANES // 32)
    factor = _constant(32 + 8 * (count - 4 * words))  # a checksum has a word of zeros behind
    launch(
        _join,
        (1,),
        *(found, weights, x, out, count, tiles, copied, factor, _BITS),
        LANES=_TILES,
        WORDS=power_of_two(copied),
        num_warps=_TILES // 32,
    )
    host = out.cpu().numpy().tobytes()
    return int.from_bytes(host[:4], "little") ^ _ONES, host[4 : 4 + head]


def _halves(number: int) -> tuple[int, int]:
    return signed(number & _ONES), signed(number >> 32)


def _constant(exponent: int) -> int:
    return signed(power_of_x(exponent))


@lru_cache(maxsize=64)
def _constants(
    turns: int, lanes: int, tiles: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Products of bytes, of the lowest first, with the power of x between the words of a lane; the
    powers of the lanes; those of tiles of so many words a lane, the last one first."""
    step = power_of_x(32 * lanes)
    bits = [times(1 << bit, step) for bit in range(32)]
    tables = []
    for byte in range(4):
        products = [0]
        for bit in bits[8 * byte : 8 * byte + 8]:
            products += [product ^ bit for product in products]
        tables += products
    places = _powers(32, lanes)[::-1]
    weights = _powers(32 * lanes * turns, tiles)
    numbers = [signed(number) for number in (*tables, *places, *weights)]
    made = torch.tensor(numbers, dtype=torch.int32, device=device)
    return made[: len(tables)], made[len(tables) : len(tables) + lanes], made[-tiles:]


def _powers(exponent: int, count: int) -> list[int]:
    """x to the multiples of an exponent, from zero on."""
    step, powers = power_of_x(exponent), [power_of_x(0)]
    while len(powers) < count:
        powers.append(times(powers[-1], step))
    return powers


@triton.jit
def _times(a, b, bits):
    """Products of polynomials, int32."""
    product = tl.zeros_like(a)
    for power in range(bits):
        product = product ^ (((a << power) >> 31) & b)
        b = ((b >> 1) & 0x7FFFFFFF) ^ ((0 - (b & 1)) & _POLYNOMIAL)
    return product


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


@triton.jit
def _turned(value, tables):
    """Times the power of x between the words of a lane."""
    product = tl.load(tables + (value & 0xFF))
    product = product ^ tl.load(tables + 256 + ((value >> 8) & 0xFF))
    product = product ^ tl.load(tables + 512 + ((value >> 16) & 0xFF))
    return product ^ tl.load(tables + 768 + ((value >> 24) & 0xFF))


@triton.jit(do_not_specialize=["start", "count", "words", "turns", "low", "high", "bits"])
def _tiles(
    x,
    found,
    tables,
    places,
    start,
    count,
    words,
    turns,
    low,
    high,
    bits,
    LANES: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    tile = LANES * turns
    first = words + (program_start(1) - tl.num_programs(0)) * tile
    value = tl.zeros((LANES,), tl.int32)
    if (4 * first >= start + 8) & (4 * (first + tile) <= count):
        memory = x.to(tl.pointer_type(tl.int32)) + first + lane
        for turn in range(turns):
            value = _turned(value, tables) ^ tl.load(memory + turn * LANES)
    else:
        for turn in range(turns):
            at = first + turn * LANES + lane
            value = _turned(value, tables) ^ _known_words(x, at, start, count, low, high)
    value = tl.xor_sum(_times(value, tl.load(places + lane), bits), axis=0)
    tl.store(found + program_start(1), value)


@triton.jit(do_not_specialize=["count", "tiles", "words", "factor", "bits"])
def _join(
    found,
    weights,
    x,
    out,
    count,
    tiles,
    words,
    factor,
    bits,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """What the tiles come to, and behind it the first words of x."""
    lane = tl.arange(0, LANES)
    value = tl.load(found + tiles - 1 - lane, mask=lane < tiles, other=0)
    value = tl.xor_sum(_times(value, tl.load(weights + lane), bits), axis=0)
    tl.store(out, _times(value, tl.full((), factor, tl.int32), bits))
    at = tl.arange(0, WORDS)
    word = _known_words(x, at.to(tl.int64), 0, count, 0, 0)
    tl.store(out + 1 + at, word, mask=at < words)
