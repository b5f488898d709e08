"""What comes after successive cancellation: how well codewords fit, and what of them is sent.

Element e of a group of `present` blocks is bit e % present of position e // present. Sums are
along the tree of reference/tables.py: blocks of 512 elements of a group, these, and groups.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.reference.tables import SUMMED
from gradwire.kernels.triton import _sums
from gradwire.kernels.triton._butterflies import fold_rows
from gradwire.kernels.triton._common import cdiv, fold, launch, power_of_two

_ROWS = 8  # sums of blocks that a program makes
_FOLDED = 8192  # sums that a program adds up
_BYTES = 2048  # bytes of a code that a program writes


def point_products(x: Tensor, word: Tensor, value: float, blocks: int) -> Tensor:
    """The sum of x times its point, -value where a bit is zero: float64, without dimensions."""
    groups, n, width = word.shape
    lanes, count = 8 * width, x.numel()
    used = cdiv(count, blocks)
    bucket = min(used * lanes, count)
    block = min(SUMMED, power_of_two(bucket))
    num_blocks = cdiv(bucket, block)
    sums = torch.empty(groups, num_blocks, dtype=torch.float64, device=x.device)
    launch(
        _products,
        (groups, cdiv(num_blocks, _ROWS)),
        x,
        word,
        sums,
        value,
        count,
        bucket,
        num_blocks,
        n,
        blocks,
        LANES=lanes,
        ROWS=_ROWS,
        BLOCK=block,
        LEVELS=block.bit_length() - 1,
    )
    return _added(_added(sums).view(1, -1)).view(())


def join_inputs(word: Tensor, rows: Tensor, blocks: int, out: Tensor) -> None:
    """Some positions of all groups, packed into `out` without lanes that hold no block."""
    groups, n, width = word.shape
    launch(
        _join,
        (groups, cdiv(len(rows) * width, _BYTES)),
        word,
        rows,
        out,
        len(rows),
        n,
        blocks,
        WIDTH=width,
        BLOCK=_BYTES,
    )


def _added(sums: Tensor) -> Tensor:
    """[rows, n] to [rows], as `sum_rows`."""
    rows, n = sums.shape
    if n > _FOLDED:
        return _sums.sum_rows(sums)
    if n == 1:
        return sums.view(-1)
    block = min(SUMMED, power_of_two(n))
    num_blocks = power_of_two(cdiv(n, block))
    out = torch.empty(rows, dtype=torch.float64, device=sums.device)
    launch(
        _add,
        (rows,),
        sums,
        out,
        n,
        BLOCKS=num_blocks,
        BLOCK=block,
        BLOCK_LEVELS=num_blocks.bit_length() - 1,
        LEVELS=block.bit_length() - 1,
    )
    return out


@triton.jit(do_not_specialize=["count", "bucket", "num_blocks", "n", "blocks"])
def _products(
    x,
    word,
    sums,
    value,
    count,
    bucket,
    num_blocks,
    n,
    blocks,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEVELS: tl.constexpr,
):
    group = tl.program_id(0)  # there may be more than 2^16
    first = tl.program_id(1) * ROWS
    # The place in its group: 2^19 positions of 64 blocks at most.
    place = first * BLOCK + tl.arange(0, ROWS * BLOCK)
    start = group.to(tl.int64) * bucket
    left = tl.minimum(count - start, bucket).to(tl.int32)
    present = tl.minimum(blocks - group * LANES, LANES)
    bits = word + group.to(tl.int64) * n * (LANES // 8)
    is_whole = (present == LANES) & ((first + ROWS) * BLOCK <= left)
    if is_whole:
        number = tl.load(x + start + place)
        byte = tl.load(bits + (place >> 3)).to(tl.int32)
        bit = (byte >> (place & 7)) & 1
    else:
        inside = place < left
        number = tl.load(x + start + place, mask=inside, other=0.0)
        lane = place % present
        at = (place // present) * (LANES // 8) + (lane >> 3)
        bit = (tl.load(bits + at, mask=inside, other=0).to(tl.int32) >> (lane & 7)) & 1
    point = tl.full((1,), 0, tl.float32) + value
    along = (number * tl.where(bit != 0, point, -point)).to(tl.float64)
    if not is_whole:
        along = tl.where(place < left, along, 0.0)
    total = fold_rows(along, ROWS, BLOCK, LEVELS)
    row = first + tl.arange(0, ROWS)
    to = sums + group.to(tl.int64) * num_blocks + row
    tl.store(to, total, mask=row < num_blocks)


@triton.jit(do_not_specialize=["n"])
def _add(
    sums,
    out,
    n,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LEVELS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS * BLOCK)
    x = tl.load(sums + row * n + at, mask=at < n, other=0.0)
    x = fold_rows(x, BLOCKS, BLOCK, LEVELS)
    tl.store(out + row + tl.arange(0, 1), fold(x, 1, BLOCKS, BLOCK_LEVELS))


@triton.jit(do_not_specialize=["num_rows", "n", "blocks"])
def _join(word, rows, out, num_rows, n, blocks, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    source = word + group.to(tl.int64) * n * WIDTH
    to = out + group.to(tl.int64) * num_rows * WIDTH
    present = tl.minimum(blocks - group * 8 * WIDTH, 8 * WIDTH)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if present == 8 * WIDTH:
        inside = at < num_rows * WIDTH
        row = tl.load(rows + at // WIDTH, mask=inside, other=0)
        byte = tl.load(source + row * WIDTH + at % WIDTH, mask=inside, other=0)
        tl.store(to + at, byte, mask=inside)
    else:
        num_bits = num_rows * present
        joined = tl.zeros((BLOCK,), tl.int32)
        for k in tl.static_range(8):
            bit = at * 8 + k
            lane = bit % present
            row = tl.load(rows + bit // present, mask=bit < num_bits, other=0)
            byte = tl.load(source + row * WIDTH + (lane >> 3), mask=bit < num_bits, other=0)
            joined |= ((byte.to(tl.int32) >> (lane & 7)) & 1) << k
        tl.store(to + at, joined.to(tl.uint8), mask=at < (num_bits + 7) // 8)
