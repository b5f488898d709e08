"""Count sketches (Charikar et al. 2002), with multiply-add-shift hashing.

Row r sends element i to the upper 32 bits of a_r i + b_r modulo 2^64, for random a_r and b_r. For
i < 2^32 that is pairwise independent (Dietzfelbinger 1996), which is all that the bounds of a
sketch ask for. The lowest of these bits is the sign, the 31 others choose a column.
"""

import torch
from torch import Tensor


def sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    rows = hashes.shape[1]
    table = torch.zeros(rows * columns, dtype=x.dtype, device=x.device)
    places, negative = _hashed(x.numel(), hashes, columns)
    signed = torch.where(negative, -x, x)
    table.index_add_(0, places.reshape(-1), signed.reshape(-1))
    return table.view(rows, columns)


def sketch_medians(table: Tensor, hashes: Tensor, count: int) -> Tensor:
    places, negative = _hashed(count, hashes, table.shape[1])
    values = table.reshape(-1)[places]
    return torch.where(negative, -values, values).median(dim=0).values


def _hashed(count: int, hashes: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Positions in the flat table, and where signs are turned: [rows, count] both."""
    multipliers, offsets = hashes[:, :, None]
    numbers = torch.arange(count, device=hashes.device)
    words = (multipliers * numbers + offsets) >> 32 & 0xFFFFFFFF  # int64 wraps as it should
    first = torch.arange(hashes.shape[1], device=hashes.device)[:, None] * columns
    return first + ((words >> 1) * columns >> 31), (words & 1).bool()
