"""Random rounding to levels that are not evenly spaced, the same above zero and below."""

import torch
from torch import Tensor

from gradwire.compression.quantization._buckets import round_at_random
from gradwire.core.key import Key


def round_to_levels(x: Tensor, levels: Tensor, key: Key) -> Tensor:
    """Each element in -1 .. 1 as a neighbouring level, at random such that E = x.

    Levels ascend from 0 to 1, [s + 1]. Returns int32: 0 is the level -1, s is 0 and 2s is 1.
    """
    s = len(levels) - 1
    magnitude = x.abs()
    low = torch.bucketize(magnitude, levels[1:-1], right=True, out_int32=True)
    floor = levels.index_select(0, low)
    gap = levels.index_select(0, low + 1) - floor
    fraction = (magnitude - floor) / torch.where(gap > 0, gap, torch.ones_like(gap))
    position = low + fraction.clamp(0, 1)
    return round_at_random(torch.copysign(position, x), key).to(torch.int32) + s


def from_levels(symbols: Tensor, levels: Tensor) -> Tensor:
    """The signed levels that the symbols name."""
    both = torch.cat([-levels.flip(0), levels[1:]])
    return both.index_select(0, symbols.to(torch.int32))
