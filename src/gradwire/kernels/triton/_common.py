"""What several operations share: launching, exact arithmetic, Philox, sums in a fixed order.

Bits are those of the reference if a kernel keeps to this:

- It is started with `launch`, which forbids the compiler to contract a * b + c.
- It divides by `tl.div_rn`, takes roots by `tl.sqrt_rn` (`/` and `tl.sqrt` are approximate for
  float32), and calls no other function of real numbers. Both take tensors, so a scalar goes there
  as `tl.full`. Constants in an expression with a float64 tensor need `tl.full`, too.
- It adds along a tree that it writes down (`fold`); the order of `tl.sum` is unspecified, but for
  integers and for two numbers.
- It leaves a function at its end only, for `if` with constants: without `else` both are compiled.
- Offsets are int64 (`program_start`): 2^31 bytes are 500 million float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from gradwire.kernels.triton._launching import launch as launch

_WORD = 1 << 32


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least one that is no less than n."""
    return 1 << max(0, n - 1).bit_length()


def signed(word: int) -> int:
    """The low 32 bits as an int32; larger ones would be int64, another kernel to compile."""
    return (word + (_WORD >> 1)) % _WORD - (_WORD >> 1)


def key_words(seed: int, stream: tuple[int, int, int]) -> tuple[int, int, int, int, int]:
    """What `philox` takes after the block, for the kernel's arguments `k0, k1, s0, s1, s2`.

    Name them in `do_not_specialize`, or a word that is one or a multiple of 16 is compiled apart.
    """
    return (signed(seed), signed(seed >> 32), *map(signed, stream))  # type: ignore[return-value]


def halves_as_bits(x: Tensor) -> Tensor:
    """bfloat16 as int16, other dtypes as they are, for `widened` and `narrowed`: the interpreter
    has no arithmetic of bfloat16, and truncates to it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


KEY_WORDS = ["k0", "k1", "s0", "s1", "s2"]  # for `do_not_specialize`


@triton.jit
def uint32(word):
    """A kernel's int32 argument as uint32. A 1 may come as a constant, which has no `to`."""
    return tl.full((), word, tl.int32).to(tl.uint32, bitcast=True)


@triton.jit
def philox(block, k0, k1, s0, s1, s2):
    """The four words, uint32, of blocks of a stream (as in reference/philox.py)."""
    return philox_impl(
        block.to(tl.uint32), uint32(s0), uint32(s1), uint32(s2), uint32(k0), uint32(k1)
    )


@triton.jit
def halfwords(block, k0, k1, s0, s1, s2):
    """Half words [n, 8], int32, of blocks [n]: element i of a vector uses half word i."""
    w0, w1, w2, w3 = philox(block, k0, k1, s0, s1, s2)
    column = tl.arange(0, 8)[None, :]
    word = tl.where(
        column < 4,
        tl.where(column < 2, w0[:, None], w1[:, None]),
        tl.where(column < 6, w2[:, None], w3[:, None]),
    )
    return ((word >> (16 * (column % 2)).to(tl.uint32)) & 0xFFFF).to(tl.int32)


@triton.jit
def fold(x, ROWS: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """Adds the halves of rows of SIZE = 2^LEVELS numbers until one is left: [ROWS]."""
    x = tl.reshape(x, (ROWS, SIZE))
    for level in tl.static_range(LEVELS):
        x = tl.reshape(x, (ROWS, 2, SIZE >> (level + 1)))
        x = tl.sum(x, axis=1)  # of two numbers, which is the same in both orders
    return tl.reshape(x, (ROWS,))


@triton.jit
def program_start(BLOCK: tl.constexpr):
    """The first element of a program's block, int64."""
    return tl.program_id(0).to(tl.int64) * BLOCK


@triton.jit
def load_block(pointer, at, count, is_whole):
    """Elements `at` of a vector, 0 beyond its `count`.

    With a mask that the compiler cannot see to be aligned it loads one element at a time, so blocks
    that lie inside the vector (`is_whole`) go without.
    """
    if is_whole:
        x = tl.load(pointer + at)
    else:
        x = tl.load(pointer + at, mask=at < count, other=0)
    return x


@triton.jit
def store_block(pointer, at, x, count, is_whole):
    """Counterpart of `load_block`."""
    if is_whole:
        tl.store(pointer + at, x)
    else:
        tl.store(pointer + at, x, mask=at < count)


@triton.jit
def floor_small(x):
    """floor(x), exactly, for |x| < 2^31: other ways may flush subnormal numbers to zero."""
    whole = x.to(tl.int32).to(x.dtype)
    return tl.where(whole > x, whole - 1, whole)


@triton.jit
def widened(x):
    """float16, or bfloat16 as int16, as float32."""
    if x.dtype == tl.int16:
        wide = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """float32 as float16, or as bfloat16 in the bits of int16, to nearest and ties to even."""
    if dtype == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, rounded)  # NaN
        half = (rounded >> 16).to(tl.int16)
    else:
        half = x.to(dtype)
    return half


@triton.jit
def divide(a, b):
    """a / b, rounded to nearest."""
    if a.dtype == tl.float32:
        quotient = tl.div_rn(a, b)
    else:
        quotient = a / b
    return quotient


@triton.jit
def unit_dither(half, like):
    """What a fraction must exceed to be rounded up, in the dtype of `like`."""
    return (half.to(like.dtype) + 0.5) * (2.0**-16)


@triton.jit
def unpack_symbol(packed, at, mask, WIDTH: tl.constexpr, BASE: tl.constexpr, DIGITS: tl.constexpr):
    """Symbols `at`, int32, of WIDTH bits up to 17, or DIGITS of them in a byte if that is not 0."""
    if DIGITS > 0:
        symbol = tl.load(packed + at // DIGITS, mask=mask, other=0).to(tl.int32)
        digit = (at % DIGITS).to(tl.int32)
        for k in tl.static_range(DIGITS - 1):
            symbol = tl.where(digit > k, symbol // BASE, symbol)
        symbol = symbol % BASE
    else:
        bit = at * WIDTH
        byte, shift = bit >> 3, (bit & 7).to(tl.int32)
        word = tl.load(packed + byte, mask=mask, other=0).to(tl.int32)
        if 8 % WIDTH != 0:
            more = mask & (shift + WIDTH > 8)
            word |= tl.load(packed + byte + 1, mask=more, other=0).to(tl.int32) << 8
        if WIDTH > 9:
            more = mask & (shift + WIDTH > 16)
            word |= tl.load(packed + byte + 2, mask=more, other=0).to(tl.int32) << 16
        symbol = (word >> shift) & ((1 << WIDTH) - 1)
    return symbol


@triton.jit
def store_packed(
    packed,
    symbol,
    group,
    num_bytes,
    whole,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Eight symbols, [groups, 8], make WIDTH bytes, at most 8; BYTES is its power of two.

    WIDE: those of a group are one number in aligned memory, of 16 or 32 bits.
    """
    column = tl.arange(0, 8)[None, :]
    if WIDTH == 2:
        word = tl.sum(symbol << (2 * column), axis=1).to(tl.int16)
    elif WIDTH == 4:
        word = tl.sum(symbol << (4 * column), axis=1)
    else:
        word = tl.sum(symbol.to(tl.uint64) << (WIDTH * column).to(tl.uint64), axis=1)
    if WIDE & whole:
        tl.store(packed.to(tl.pointer_type(word.dtype)) + group, word)
    else:
        byte = tl.arange(0, BYTES)[None, :]
        at = group[:, None] * WIDTH + byte
        value = (word[:, None] >> (8 * byte).to(word.dtype)).to(tl.uint8)
        tl.store(packed + at, value, mask=(byte < WIDTH) & (at < num_bytes))
