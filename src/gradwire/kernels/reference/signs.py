"""Signs scaled by mean magnitudes: feedback, packing and the new residual.

Magnitudes are added in float64 along a fixed tree: blocks of 256 are folded in halves down to one
number, then the numbers of a bucket, filled up with zeros to a power of two. The order of torch's
own sum depends on the processor; this one gives the same bits everywhere.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.kernels.reference.bits import pack_signs, unpack_signs

_BLOCK = 256


def mean_magnitudes(x: Tensor, bucket: int) -> Tensor:
    """The mean of |x| over each bucket, float64 [num_buckets]."""
    count = x.numel()
    if not count:
        return x.new_zeros(0, dtype=torch.float64)
    bucket = min(bucket, count)
    num_buckets = -(-count // bucket)
    width = -(-bucket // _BLOCK)  # blocks of one bucket
    folded = F.pad(x.abs().to(torch.float64), (0, num_buckets * bucket - count))
    folded = F.pad(folded.reshape(num_buckets, bucket), (0, width * _BLOCK - bucket))
    sums = _fold(folded.reshape(-1, _BLOCK)).reshape(num_buckets, width)
    sums = _fold(F.pad(sums, (0, (1 << (width - 1).bit_length()) - width)))
    sizes = torch.full((num_buckets,), bucket, dtype=torch.float64, device=x.device)
    sizes[-1] = count - (num_buckets - 1) * bucket
    return sums / sizes


def _fold(rows: Tensor) -> Tensor:
    """Adds the halves of rows of 2^k elements until one is left: [rows]."""
    while rows.shape[1] > 1:
        rows = rows[:, : rows.shape[1] // 2] + rows[:, rows.shape[1] // 2 :]
    return rows[:, 0]


def encode_signs(
    x: Tensor, residual: Tensor | None, bucket: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    p = x if residual is None else x + residual
    scale = mean_magnitudes(p, bucket).to(torch.float32)
    packed = pack_signs(p)
    if out is not None:
        torch.sub(p, mean_signs([packed], [scale], p.numel(), bucket, None), out=out)
    return scale, packed


def encode_signs_in(
    x: Tensor,
    residual: Tensor | None,
    bucket: int,
    out: Tensor | None,
    buffer: Tensor,
    scale_at: int,
    packed_at: int,
) -> None:
    """`encode_signs` into bytes: scales from byte `scale_at` on, signs from `packed_at` on."""
    into = parts_in(buffer, scale_at, packed_at, x.numel(), bucket)
    for memory, made in zip(into, encode_signs(x, residual, bucket, out)):
        memory.copy_(made)


def parts_in(
    buffer: Tensor, scale_at: int, packed_at: int, count: int, bucket: int
) -> tuple[Tensor, Tensor]:
    """Views of scales and packed signs of `count` elements in bytes."""
    num_scales = -(-count // max(1, bucket))
    scale = buffer[scale_at : scale_at + 4 * num_scales].view(torch.float32)
    return scale, buffer[packed_at : packed_at - (-count // 8)]


def encode_signs_rows(
    x: Tensor, residual: Tensor | None, bucket: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`encode_signs` of every row."""
    bucket = max(1, min(bucket, x.shape[1]))
    scale = x.new_empty(len(x), -(-x.shape[1] // bucket))
    packed = torch.empty(len(x), -(-x.shape[1] // 8), dtype=torch.uint8, device=x.device)
    for row in range(len(x)):
        own, lost = (None if each is None else each[row] for each in (residual, out))
        scale[row], packed[row] = encode_signs(x[row], own, bucket, lost)
    return scale, packed


def mean_signs(
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    count: int,
    bucket: int,
    out: Tensor | None,
) -> Tensor:
    terms = [
        unpack_signs(bits, count, torch.float32) * each.repeat_interleave(bucket)[:count]
        for bits, each in zip(packed, scale)
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return torch.div(total, len(terms), out=out)


def mean_signs_in(
    buffers: Sequence[Tensor],
    scale_at: int,
    packed_at: int,
    count: int,
    bucket: int,
    out: Tensor | None,
) -> Tensor:
    """`mean_signs` of what `encode_signs_in` has written."""
    parts = [parts_in(buffer, scale_at, packed_at, count, bucket) for buffer in buffers]
    return mean_signs([bits for _, bits in parts], [s for s, _ in parts], count, bucket, out)
