"""One element of each of k equal strata, in C: those of reference/strata.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, parallel

_CPU = torch.device("cpu")
_MASK = 0xFFFFFFFF


def strata_positions(
    numel: int, count: int, seed: int, stream: tuple[int, int, int], device: torch.device
) -> Tensor:
    positions = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        parallel().gw_strata_positions(
            numel,
            count,
            seed & 0xFFFFFFFFFFFFFFFF,
            *(word & _MASK for word in stream),
            positions.data_ptr(),
        )
    return positions


def strata_values(
    x: Tensor, count: int, seed: int, stream: tuple[int, int, int], scaled: bool
) -> Tensor:
    x = dense(x)
    values = torch.empty(count, dtype=torch.float32, device=_CPU)
    if count:
        parallel().gw_strata_gather(
            x.data_ptr(),
            x.numel(),
            count,
            seed & 0xFFFFFFFFFFFFFFFF,
            *(word & _MASK for word in stream),
            int(scaled),
            values.data_ptr(),
        )
    return values
