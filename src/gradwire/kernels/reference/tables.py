"""Rounding to tables of levels, packed, and back; what is summed or compared in each bucket first.

Sums are in float64, along a tree of fixed shape: a bucket is cut into blocks of 512, the last one
filled up with zeros, each block folded in halves, and the sums of blocks are added likewise. So
they are the same bits on every processor and with any number of threads.

Where rounding is at random, element i goes up if (h_i + 1/2) / 2^16 lies below the fraction to be
rounded, where h_i is half number i of a Philox stream: low and high half of each word.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.kernels.reference.bits import pack_digits, pack_uints, unpack_digits, unpack_uints
from gradwire.kernels.reference.philox import philox_words

SUMMED = 512  # elements of one block

Draw = tuple[int, tuple[int, int, int]]  # seed and stream
Packing = tuple[int, int, int]  # size of the alphabet, bits of a symbol, digits in a byte or 0


def bucket_maxima(x: Tensor, bucket: int) -> Tensor:
    return _rows(x, bucket).abs().amax(dim=1) if x.numel() else x.new_zeros(0)


def bucket_extremes(x: Tensor, bucket: int) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return x, x
    count = -(-x.numel() // bucket)
    filled = torch.cat([x, x[-1:].expand(count * bucket - x.numel())])
    low, high = filled.reshape(count, bucket).aminmax(dim=1)
    return low + 0.0, high + 0.0


def bucket_squares(x: Tensor, bucket: int) -> Tensor:
    return sum_rows(_rows(x.to(torch.float64), bucket).square())


def bucket_sides(x: Tensor, bucket: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = _rows(x.to(torch.float64), bucket)
    zero = torch.zeros_like(rows)
    above, below = torch.where(rows > 0, rows, zero), torch.where(rows < 0, -rows, zero)
    return sum_rows(above), sum_rows(below), (rows < 0).sum(dim=1)


def sum_rows(rows: Tensor) -> Tensor:
    """float64 [rows, n] added up along the tree, [rows]."""
    while rows.shape[1] > 1:
        # Sums of zeros are left out where one block is more than enough.
        size = min(SUMMED, 1 << (rows.shape[1] - 1).bit_length())
        blocks = -(-rows.shape[1] // size)
        rows = F.pad(rows, (0, blocks * size - rows.shape[1])).reshape(len(rows), blocks, size)
        half = size // 2
        while half:
            rows = rows[:, :, :half] + rows[:, :, half:]
            half //= 2
        rows = rows[:, :, 0]
    return rows.reshape(-1)


def to_levels(
    x: Tensor, scale: Tensor | None, bucket: int, levels: Tensor, draw: Draw, packing: Packing
) -> Tensor:
    if scale is not None:
        x = (x / _each(_safe(scale), bucket, x.numel())).clamp(-1, 1)
    s, magnitude = len(levels) - 1, x.abs()
    low = torch.bucketize(magnitude, levels[1:-1], right=True, out_int32=True)
    floor = levels.index_select(0, low)
    gap = levels.index_select(0, low + 1) - floor
    fraction = ((magnitude - floor) / _safe(gap)).clamp(0, 1)
    level = low + (_dither(x, draw) < fraction)
    return _packed(torch.where(x < 0, s - level, s + level), packing)


def to_whole(
    x: Tensor,
    step: Tensor,
    start: Tensor | None,
    bucket: int,
    least: int,
    most: int,
    draw: Draw | None,
    packing: Packing,
) -> Tensor:
    if start is not None:
        x = x - _each(start, bucket, x.numel())
    x = (x / _each(_safe(step), bucket, x.numel())).clamp(least, most)
    if draw is None:
        whole = x.round()
    else:
        floor = x.floor()
        whole = floor + (_dither(x, draw) < x - floor)
    return _packed((whole - least).to(torch.int32), packing)


def to_cells(x: Tensor, scale: Tensor, bucket: int, edges: Tensor, packing: Packing) -> Tensor:
    x = x / _each(_safe(scale), bucket, x.numel())
    return _packed(torch.bucketize(x, edges, right=True, out_int32=True), packing)


def cell_products(
    x: Tensor, packed: Tensor, bucket: int, values: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    code = values.index_select(0, _unpacked(packed, x.numel(), packing))
    along = (x * code).to(torch.float64)
    return sum_rows(_rows(along, bucket)), sum_rows(_rows(code.square().to(torch.float64), bucket))


def to_fp8(x: Tensor, scale: Tensor, bucket: int, dtype: torch.dtype) -> Tensor:
    x = (x / _each(_safe(scale), bucket, x.numel())).clamp(-1, 1) * torch.finfo(dtype).max
    return x.float().to(dtype).view(torch.uint8)


def from_table(
    packed: Tensor,
    packing: Packing,
    table: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
    bucket: int,
    count: int,
) -> tuple[Tensor, bool]:
    alphabet, _, digits = packing
    symbols = _unpacked(packed, count, packing)
    bad = packed >= alphabet**digits if digits else symbols >= alphabet
    if bool(bad.any()):
        return table.new_zeros(count), False
    out = table.index_select(0, symbols)
    ok = bool(torch.isfinite(out).all())
    if scale is not None:
        out = out * _each(scale, bucket, count)
    if start is not None:
        out = out + _each(start, bucket, count)
    largest = torch.finfo(out.dtype).max
    return out.clamp(-largest, largest), ok


def from_pairs(packed: Tensor, pairs: Tensor, bucket: int, count: int) -> Tensor:
    first, second = pairs.repeat_interleave(bucket, dim=0)[:count].unbind(dim=1)
    return torch.where(unpack_uints(packed, 1, count) != 0, second, first)


def shorten_runs(packed: Tensor, zero: int, longest: int) -> Tensor:
    if not packed.numel():
        return packed
    positions = torch.arange(packed.numel(), device=packed.device)
    is_zero = packed == zero
    # Where a run is longer than a byte can say, a new one begins.
    last_other = torch.cummax(torch.where(is_zero, -1, positions), dim=0).values
    dropped = is_zero & ((positions - last_other - 1) % longest != 0)
    kept = positions[~dropped]
    # Only zeros are dropped, so the way to the next kept byte is the length of a run.
    lengths = torch.diff(kept, append=kept.new_full((1,), packed.numel()))
    return torch.where(lengths > 1, lengths + 255 - longest, packed[kept]).to(torch.uint8)


def lengthen_runs(code: Tensor, zero: int, longest: int, count: int) -> tuple[Tensor, int]:
    run = code > 256 - longest
    lengths = torch.where(run, code.long() - (255 - longest), 1)
    total = int(lengths.sum())
    if total != count:
        return code.new_zeros(count), total
    return torch.where(run, zero, code).to(torch.uint8).repeat_interleave(lengths), total


def _safe(divisor: Tensor) -> Tensor:
    return torch.where(divisor > 0, divisor, torch.ones_like(divisor))


def _each(scale: Tensor, bucket: int, count: int) -> Tensor:
    return scale.repeat_interleave(bucket)[:count]


def _rows(x: Tensor, bucket: int) -> Tensor:
    count = -(-x.numel() // bucket)
    return F.pad(x, (0, count * bucket - x.numel())).reshape(count, bucket)


def _dither(x: Tensor, draw: Draw) -> Tensor:
    words = philox_words(*draw, (x.numel() + 1) // 2, x.device)
    halves = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], dim=1).reshape(-1)[: x.numel()]
    return (halves.to(x.dtype) + 0.5) * 2.0**-16


def _packed(symbols: Tensor, packing: Packing) -> Tensor:
    alphabet, width, digits = packing
    return pack_digits(symbols, alphabet, digits) if digits else pack_uints(symbols, width)


def _unpacked(packed: Tensor, count: int, packing: Packing) -> Tensor:
    alphabet, width, digits = packing
    if digits:
        return unpack_digits(packed, alphabet, digits, count)
    return unpack_uints(packed, width, count)
