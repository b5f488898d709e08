"""Rounding at random to whole levels of a bucket's maximum: feedback, packing, new residual.

Element i is rounded up if (h_i + 1/2) / 2^16 lies below the fraction to be rounded, where h_i is
half number i of a Philox stream: low and high half of each word.

The reciprocal of a very small maximum leaves the range, and so do the bits of a step. Buckets with
a maximum below 2^-100 (2^26 times the smallest normal number) are multiplied by 2^100 first, and
what they decode to by 2^-100 last. Both are exact but for results that are subnormal themselves.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire.kernels.reference.bits import pack_uints, unpack_uints
from gradwire.kernels.reference.philox import philox_words


def encode_levels(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    p = x if residual is None else x + residual
    count, s = p.numel(), num_levels
    num_buckets = -(-count // bucket)
    buckets = F.pad(p, (0, num_buckets * bucket - count)).reshape(num_buckets, bucket)
    scale = buckets.abs().amax(dim=1) if count else buckets.new_zeros(0)
    if not bool(torch.isfinite(scale).all()):
        return scale, pack_uints(torch.zeros(count, dtype=torch.int32), width)
    raised = headroom(scale)
    factor = torch.where(scale > 0, s / (scale * raised), torch.zeros_like(scale))
    scaled = (buckets * raised[:, None] * factor[:, None]).reshape(-1)[:count].clamp(-s, s)
    words = philox_words(seed, stream, (count + 1) // 2, p.device)
    halves = torch.stack([words & 0xFFFF, (words >> 16) & 0xFFFF], dim=1).reshape(-1)[:count]
    floor = scaled.floor()
    up = (halves.to(torch.float32) + 0.5) * 2.0**-16 < scaled - floor
    packed = pack_uints((floor + up + s).to(torch.int32), width)
    if out is not None:
        decoded, _ = decode_levels(packed, scale, num_levels, bucket, width, count, None)
        torch.sub(p, decoded, out=out)
    return scale, packed


def encode_levels_rows(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`encode_levels` of every row; the last word of row r's stream is r more."""
    count = x.shape[1]
    scale = x.new_empty(len(x), -(-count // bucket))
    packed = torch.empty(len(x), -(-count * width // 8), dtype=torch.uint8, device=x.device)
    for row in range(len(x)):
        own, lost = (None if each is None else each[row] for each in (residual, out))
        words = (*stream[:2], stream[2] + row)
        scale[row], packed[row] = encode_levels(
            x[row], own, num_levels, bucket, width, seed, words, lost
        )
    return scale, packed


def decode_levels(
    packed: Tensor,
    scale: Tensor,
    num_levels: int,
    bucket: int,
    width: int,
    count: int,
    out: Tensor | None,
    checked: bool = True,
) -> tuple[Tensor, int]:
    symbols = unpack_uints(packed, width, count)
    levels = symbols.to(torch.float32) - num_levels
    raised = headroom(scale)
    step = scale * raised / scale.new_tensor(num_levels)
    largest = torch.finfo(torch.float32).max
    values = levels * _each(step, bucket, count) * _each(1 / raised, bucket, count)
    decoded = torch.clamp(values, -largest, largest, out=out)
    return decoded, int(symbols.max()) if count else 0


def headroom(scale: Tensor) -> Tensor:
    """The powers of two by which buckets of these scales are multiplied: 2^100 or 1."""
    is_tiny = scale < torch.finfo(scale.dtype).tiny * 2.0**26
    return torch.where(is_tiny, scale.new_tensor(2.0**100), scale.new_tensor(1.0))


def _each(scale: Tensor, bucket: int, count: int) -> Tensor:
    return scale.repeat_interleave(bucket)[:count]
