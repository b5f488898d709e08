"""The fast Walsh-Hadamard transform in C: the same butterflies as reference/hadamard.py in the
same order, so the same bits."""

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, parallel
from gradwire.kernels.reference import hadamard as reference

_CPU = torch.device("cpu")
_SHARED_NUMEL, _MAX_THREADS = 1 << 18, 64  # in hadamard.c and threads.h


def hadamard(
    x: Tensor, before: Tensor | None, after: Tensor | None, out: Tensor | None = None
) -> Tensor:
    x = dense(x)
    before = None if before is None else dense(before)
    after = None if after is None else dense(after)
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=_CPU) if out is None else out
    parallel().gw_hadamard(
        x.data_ptr(),
        x.element_size(),
        rows,
        n,
        reference.factor(n),
        None if before is None else before.data_ptr(),
        None if after is None else after.data_ptr(),
        out.data_ptr(),
    )
    return out


def rotated_signs(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, n = x.shape
    if x.dtype != torch.float32 or n < 8:
        return reference.rotated_signs(x, before)
    x, before = dense(x), dense(before)
    packed = torch.empty(rows * n // 8, dtype=torch.uint8, device=_CPU)
    sums = torch.empty(2, rows, dtype=torch.float64, device=_CPU)
    threads = 1 if n >= _SHARED_NUMEL else min(torch.get_num_threads(), _MAX_THREADS)
    row = torch.empty(threads, n, dtype=torch.float32, device=_CPU)
    room = torch.empty(threads, n // 4, dtype=torch.float64, device=_CPU)
    parallel().gw_rotated_signs(
        x.data_ptr(),
        rows,
        n,
        reference.factor(n),
        before.data_ptr(),
        row.data_ptr(),
        room.data_ptr(),
        packed.data_ptr(),
        sums[0].data_ptr(),
        sums[1].data_ptr(),
    )
    return packed, sums[0], sums[1]


def unrotated_signs(
    packed: Tensor, scale: Tensor, n: int, after: Tensor, out: Tensor | None = None
) -> Tensor:
    if scale.dtype != torch.float32 or n < 8:
        return reference.unrotated_signs(packed, scale, n, after, out)
    packed, scale, after = dense(packed), dense(scale), dense(after)
    rows = len(scale)
    out = torch.empty(rows, n, dtype=torch.float32, device=_CPU) if out is None else out
    parallel().gw_unrotated_signs(
        packed.data_ptr(),
        scale.data_ptr(),
        rows,
        n,
        reference.factor(n),
        after.data_ptr(),
        out.data_ptr(),
    )
    return out
