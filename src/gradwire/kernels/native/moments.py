"""Sums over a whole vector, in C: the bits of reference/moments.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, parallel
from gradwire.kernels.reference import moments as reference
from gradwire.kernels.reference.tables import SUMMED, sum_rows

_CPU = torch.device("cpu")


def moments(x: Tensor) -> tuple[float, float]:
    x = dense(x)
    sums, squares = _blocks(x, torch.float64), _blocks(x, torch.float64)
    parallel().gw_moments(x.data_ptr(), x.numel(), sums.data_ptr(), squares.data_ptr())
    return float(sum_rows(sums)), float(sum_rows(squares))


def tails(x: Tensor, threshold: float) -> reference.Tails:
    x = dense(x)
    outer, inner = _blocks(x, torch.float64), _blocks(x, torch.float64)
    above, below = _blocks(x, torch.int64), _blocks(x, torch.int64)
    parallel().gw_tails(
        x.data_ptr(),
        x.numel(),
        threshold,
        *(blocks.data_ptr() for blocks in (outer, inner, above, below)),
    )
    return reference.Tails(
        int(above.sum()), int(below.sum()), float(sum_rows(outer)), float(sum_rows(inner))
    )


def _blocks(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((1, -(-x.numel() // SUMMED)), dtype=dtype, device=_CPU)
