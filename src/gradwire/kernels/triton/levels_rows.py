"""Decoding of the levels of all rows of a matrix by one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton._common import (
    cdiv,
    launch,
    power_of_two,
    program_start,
    store_block,
    uint32,
)
from gradwire.kernels.triton.bits import unpack_symbol
from gradwire.kernels.triton.levels import _SMALL, _TILE, _decoded, _step


def decode_levels_rows(
    packed: Tensor, scale: Tensor, num_levels: int, bucket: int, width: int, count: int
) -> Tensor:
    rows = len(packed)
    out = torch.empty(rows, count, dtype=torch.float32, device=packed.device)
    fused = bucket <= _SMALL and power_of_two(bucket) == bucket
    launch(
        _decode,
        (cdiv(count, _TILE), rows),
        packed.contiguous(),
        scale.contiguous(),
        out,
        count,
        packed.shape[1],
        scale.shape[1],
        bucket,
        num_levels,
        WIDTH=width,
        BUCKET=bucket if fused else 8,
        BUCKETS=_TILE // (bucket if fused else 8),
        FUSED=fused,
    )
    return out


@triton.jit(do_not_specialize=["num_bytes", "num_buckets"])
def _decode(
    packed,
    scale,
    out,
    count,
    num_bytes,
    num_buckets,
    bucket,
    num_levels,
    WIDTH: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    FUSED: tl.constexpr,
):
    """[BUCKETS, BUCKET] elements of a row; where not FUSED those of eight are of some bucket."""
    row = tl.program_id(1).to(tl.int64)
    start = program_start(BUCKETS * BUCKET)
    whole = start + BUCKETS * BUCKET <= count
    b = program_start(BUCKETS) + tl.arange(0, BUCKETS)
    at = b[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    mask = at < count
    symbol = tl.where(mask, unpack_symbol(packed + row * num_bytes, at, mask, WIDTH, 0, 0), 0)
    mine = b
    if not FUSED:
        mine = (b.to(tl.uint32) // uint32(bucket // 8)).to(tl.int64)
    largest = tl.load(scale + row * num_buckets + mine, mask=b * BUCKET < count, other=0)
    step, lowered = _step(largest, num_levels)
    level = (symbol - num_levels).to(tl.float32)
    value = _decoded(level, step[:, None], lowered[:, None])
    store_block(out + row * count, at, value, count, whole)
