"""Signs scaled by mean magnitudes, along the tree of reference/signs.py: what is started when.

A bucket of up to _SMALL elements is done by one program, in one pass. Of longer buckets a first
kernel packs the signs and adds up blocks of 256, others add those, and the last one writes what is
lost: x and the residual are read twice. Rows of a matrix are vectors of their own. Means of what
was encoded are in _sign_means.py.
"""

import torch
from torch import Tensor

from gradwire.kernels.triton._common import cdiv, launch, power_of_two
from gradwire.kernels.triton._sign_kernels import (
    encode_blocks,
    encode_small,
    fold_columns,
    lost,
    scales,
)
from gradwire.kernels.triton._sign_means import mean_signs as mean_signs

_BLOCK = 256  # elements that are added first
_TILE = 4096  # elements of a program
_SMALL = 4096  # elements of a bucket that one program adds up
_FOLDED = 2048  # sums that one program adds up


def encode_signs(
    x: Tensor,
    residual: Tensor | None,
    bucket: int,
    out: Tensor | None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    count, device = x.numel(), x.device
    bucket = max(1, min(bucket, count))
    if into is None:
        scale = torch.empty(cdiv(count, bucket), dtype=torch.float32, device=device)
        into = scale, torch.empty(cdiv(count, 8), dtype=torch.uint8, device=device)
    _encode(x, residual, bucket, out, *into, (1, count))
    return into


def encode_signs_rows(
    x: Tensor, residual: Tensor | None, bucket: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, count = x.shape
    bucket = max(1, min(bucket, count))
    scale = torch.empty(rows, cdiv(count, bucket), dtype=torch.float32, device=x.device)
    packed = torch.empty(rows, cdiv(count, 8), dtype=torch.uint8, device=x.device)
    _encode(x, residual, bucket, out, scale, packed, (rows, count))
    return scale, packed


def mean_magnitudes(x: Tensor, bucket: int) -> Tensor:
    count = x.numel()
    bucket = max(1, min(bucket, count))
    means = torch.empty(cdiv(count, bucket), dtype=torch.float64, device=x.device)
    _encode(x, None, bucket, None, means, None, (1, count))
    return means


def _encode(
    x: Tensor,
    residual: Tensor | None,
    bucket: int,
    out: Tensor | None,
    scale: Tensor,
    packed: Tensor | None,
    shape: tuple[int, int],
) -> None:
    """Means of magnitudes into `scale`, signs into `packed`, what is lost into `out`."""
    rows, count = shape
    if not rows or not count:
        return
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    given = x, x if residual is None else residual, x if out is None else out
    how = {
        "HAS_RESIDUAL": residual is not None,
        "HAS_OUT": out is not None,
        "PACKS": packed is not None,
        "ONE_ROW": rows == 1,  # its offset of zero is known to be aligned
    }
    num_buckets, bits = cdiv(count, bucket), x if packed is None else packed
    if bucket <= _SMALL:
        lanes = power_of_two(max(8, bucket))
        block = min(lanes, _BLOCK)
        buckets = max(1, _TILE // lanes)
        launch(
            encode_small,
            (cdiv(num_buckets, buckets), rows),
            *given,
            bits,
            scale,
            count,
            bucket,
            num_buckets,
            BUCKETS=buckets,
            BLOCKS=lanes // block,
            BLOCK=block,
            BUCKET_LEVELS=(lanes // block).bit_length() - 1,
            BLOCK_LEVELS=block.bit_length() - 1,
            FILLS=lanes == bucket,
            **how,
        )
        return
    width = cdiv(bucket, _BLOCK)  # blocks of one bucket
    num_blocks = width * num_buckets
    sums = torch.empty(rows, num_blocks, dtype=torch.float64, device=x.device)
    launch(
        encode_blocks,
        (cdiv(num_blocks, _TILE // _BLOCK), rows),
        *given,
        bits,
        sums,
        count,
        bucket,
        width,
        num_blocks,
        FILLS=num_buckets == 1 or bucket % _BLOCK == 0,
        BLOCKS=_TILE // _BLOCK,
        WIDE=rows == 1 and bits.data_ptr() % 4 == 0,
        **how,
    )
    sums, width = _fold_buckets(sums, rows * num_buckets, width)
    size = power_of_two(width)
    launch(
        scales,
        (num_buckets, rows),
        sums,
        scale,
        count,
        bucket,
        width,
        SIZE=size,
        LEVELS=size.bit_length() - 1,
    )
    if out is not None:
        launch(
            lost,
            (cdiv(count, _TILE), rows),
            *given,
            scale,
            count,
            bucket,
            num_buckets,
            SINGLE=num_buckets == 1,
            HAS_RESIDUAL=residual is not None,
            ONE_ROW=rows == 1,
            BLOCK=_TILE,
        )


def _fold_buckets(sums: Tensor, num_buckets: int, width: int) -> tuple[Tensor, int]:
    """Sums of which every bucket has `width`, added up until these are few, and how many."""
    while width > _FOLDED:
        size = power_of_two(width)
        folded = min(size // (_FOLDED // 2), 1024)
        left = size // folded
        columns = max(1, min(left, 4096 // folded // 2))
        out = torch.empty(num_buckets, left, dtype=torch.float64, device=sums.device)
        launch(
            fold_columns,
            (left // columns, num_buckets),
            sums,
            out,
            width,
            left,
            FOLDED=folded,
            LEVELS=folded.bit_length() - 1,
            COLUMNS=columns,
        )
        sums, width = out, left
    return sums, width
