"""Elements of large magnitude, in C: those of reference/selection.py, exactly."""

import struct

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, parallel, pointer


def select_largest(
    x: Tensor, residual: Tensor | None, count: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, residual = dense(x), None if residual is None else dense(residual)
    capacity = min(x.numel(), 2 * count + 4096)  # candidates: see `guess` in selection.c
    indices, values = _room(capacity)
    if count:
        parallel().gw_select_largest(
            x.data_ptr(),
            pointer(residual),
            x.numel(),
            count,
            capacity,
            indices.data_ptr(),
            values.data_ptr(),
            pointer(out),
        )
    elif out is not None:
        select_above(x, residual, float("inf"), 0, out)
    return indices[:count], values[:count]


def select_above(
    x: Tensor, residual: Tensor | None, threshold: float, capacity: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, residual = dense(x), None if residual is None else dense(residual)
    (bits,) = struct.unpack("<I", struct.pack("<f", threshold))
    while True:
        indices, values = _room(capacity)
        found = parallel().gw_select_above(
            x.data_ptr(),
            pointer(residual),
            x.numel(),
            bits,
            capacity,
            indices.data_ptr(),
            values.data_ptr(),
            pointer(out),
        )
        if found <= capacity:
            return indices[:found], values[:found]
        capacity = found


def _room(capacity: int) -> tuple[Tensor, Tensor]:
    return (empty(capacity, torch.int64), empty(capacity))
