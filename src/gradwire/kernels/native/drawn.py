"""Elements kept at random, in C: those of reference/drawn.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, parallel

_CPU = torch.device("cpu")
_MASK = 0xFFFFFFFF


def draw_candidates(
    x: Tensor, factor: float, seed: int, stream: tuple[int, int, int], capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    x = dense(x)
    while True:
        indices = torch.empty(capacity, dtype=torch.int64, device=_CPU)
        values = torch.empty(capacity, dtype=torch.float32, device=_CPU)
        halves = torch.empty(capacity, dtype=torch.int32, device=_CPU)
        found = parallel().gw_draw(
            x.data_ptr(),
            x.numel(),
            factor,
            seed & 0xFFFFFFFFFFFFFFFF,
            *(word & _MASK for word in stream),
            capacity,
            *(room.data_ptr() for room in (indices, values, halves)),
        )
        if found >= 0:
            return indices[:found], values[:found], halves[:found]
        capacity = -found
