"""Count sketches in C: those of reference/sketch.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, parallel
from gradwire.kernels.reference import sketch as reference

_CPU = torch.device("cpu")
_MOST_ROWS = 64  # in sketch.c


def sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    x, hashes, rows = dense(x), dense(hashes), hashes.shape[1]
    table = torch.zeros((rows, columns), dtype=torch.float32, device=_CPU)
    parallel().gw_sketch(
        x.data_ptr(),
        x.numel(),
        rows,
        columns,
        hashes[0].data_ptr(),
        hashes[1].data_ptr(),
        table.data_ptr(),
    )
    return table


def sketch_medians(table: Tensor, hashes: Tensor, count: int) -> Tensor:
    rows, columns = table.shape
    if rows > _MOST_ROWS:
        return reference.sketch_medians(table, hashes, count)
    table, hashes, out = dense(table), dense(hashes), empty(count)
    parallel().gw_sketch_medians(
        table.data_ptr(),
        count,
        rows,
        columns,
        hashes[0].data_ptr(),
        hashes[1].data_ptr(),
        out.data_ptr(),
    )
    return out
