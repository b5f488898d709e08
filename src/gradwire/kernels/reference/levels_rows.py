"""Decoding of the levels of each row of a matrix."""

import torch
from torch import Tensor

from gradwire.kernels.reference.levels import decode_levels


def decode_levels_rows(
    packed: Tensor, scale: Tensor, num_levels: int, bucket: int, width: int, count: int
) -> Tensor:
    decoded = packed.new_empty(len(packed), count, dtype=torch.float32)
    for levels, largest, out in zip(packed, scale, decoded):
        decode_levels(levels, largest, num_levels, bucket, width, count, out)
    return decoded
