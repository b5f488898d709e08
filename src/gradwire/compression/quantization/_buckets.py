"""Shared by quantisers: vectors cut into buckets, and random rounding."""

import torch
from torch import Tensor

from gradwire.core.key import Key


def num_buckets(numel: int, bucket: int) -> int:
    return -(-numel // bucket)


def to_buckets(x: Tensor, bucket: int) -> Tensor:
    """[d] as [num_buckets, bucket], the last one filled up with zeros."""
    count = num_buckets(x.numel(), bucket)
    padding = count * bucket - x.numel()
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    return x.reshape(count, bucket)


def from_buckets(buckets: Tensor, numel: int) -> Tensor:
    """[num_buckets, bucket] as [numel], without what filled the last one up."""
    return buckets.reshape(-1)[:numel]


def dither(count: int, key: Key, like: Tensor) -> Tensor:
    """Uniform on (0, 1) in steps of 2^-16: one Philox block serves eight elements.

    So a fraction below 2^-17 always rounds down: rounding is unbiased up to that part of a step.
    """
    return (key.halfwords(count, like.device).to(like.dtype) + 0.5) * 2.0**-16


def round_at_random(x: Tensor, key: Key) -> Tensor:
    """To a neighbouring whole number, up with probability x - floor(x): E = x."""
    floor = x.floor()
    return floor + (dither(x.numel(), key, x).reshape(x.shape) < x - floor)
