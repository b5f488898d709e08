"""Elements of large magnitude, in C: those of reference/selection.py, exactly."""

import struct
from typing import Any

import torch
from torch import Tensor

from gradwire.kernels._motion import Motion, Residual
from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, parallel, pointer


def select_largest(
    x: Tensor, residual: Residual | None, count: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, residual = dense(x), _dense(residual)
    capacity = min(x.numel(), 2 * count + 4096)  # candidates: see `guess` in selection.c
    indices, values = _allocate(capacity)
    results = (indices.data_ptr(), values.data_ptr(), pointer(out))
    if not count:
        if out is not None:
            select_above(x, residual, float("inf"), 0, out)
    elif isinstance(residual, Motion):
        parallel().gw_move_largest(
            *_selection_arguments(x, residual), count, capacity, *results, residual.moved.data_ptr()
        )
    else:
        parallel().gw_select_largest(
            x.data_ptr(), pointer(residual), x.numel(), count, capacity, *results
        )
    return indices[:count], values[:count]


def select_above(
    x: Tensor, residual: Residual | None, threshold: float, capacity: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, residual = dense(x), _dense(residual)
    (bits,) = struct.unpack("<I", struct.pack("<f", threshold))
    while True:
        indices, values = _allocate(capacity)
        results = (indices.data_ptr(), values.data_ptr(), pointer(out))
        if isinstance(residual, Motion):
            found = parallel().gw_move_above(
                *_selection_arguments(x, residual),
                bits,
                capacity,
                *results,
                residual.moved.data_ptr(),
            )
        else:
            found = parallel().gw_select_above(
                x.data_ptr(), pointer(residual), x.numel(), bits, capacity, *results
            )
        if found <= capacity:
            return indices[:found], values[:found]
        capacity = found


def _dense(residual: Residual | None) -> Residual | None:
    """The residual as C may read it; output vectors were checked before."""
    if isinstance(residual, Motion):
        return residual.replaced(dense(residual.residual), dense(residual.velocity))
    return None if residual is None else dense(residual)


def _selection_arguments(x: Tensor, motion: Motion) -> tuple[Any, ...]:
    """The C arguments for the vector that elements are selected from."""
    vectors = (x, motion.residual, motion.velocity)
    rule = (motion.momentum, motion.scale, motion.nesterov, motion.masks)
    return (*(vector.data_ptr() for vector in vectors), *rule, x.numel())


def _allocate(capacity: int) -> tuple[Tensor, Tensor]:
    return (empty(capacity, torch.int64), empty(capacity))
