"""Signs scaled by mean magnitudes, in C: the bits of reference/signs.py, exactly."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, parallel, pointer

_CPU = torch.device("cpu")
_BLOCK = 256  # in signs.c


def encode_signs(
    x: Tensor, residual: Tensor | None, bucket: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, residual = dense(x), None if residual is None else dense(residual)
    count = x.numel()
    bucket = max(1, min(bucket, count))
    scale = torch.empty(-(-count // bucket), dtype=torch.float32, device=_CPU)
    packed = empty(-(-count // 8), torch.uint8)
    sums = torch.empty(-(-bucket // _BLOCK), dtype=torch.float64, device=_CPU)
    parallel().gw_encode_signs(
        x.data_ptr(),
        pointer(residual),
        count,
        bucket,
        sums.data_ptr(),
        scale.data_ptr(),
        packed.data_ptr(),
        pointer(out),
    )
    return scale, packed


def mean_signs(
    packed: Sequence[Tensor],
    scale: Sequence[Tensor],
    count: int,
    bucket: int,
    out: Tensor | None,
) -> Tensor:
    n = len(packed)
    packed, scale = [dense(bits) for bits in packed], [dense(each) for each in scale]
    if out is None:
        out = empty(count)
    parallel().gw_mean_signs(
        (ctypes.c_void_p * n)(*(bits.data_ptr() for bits in packed)),
        (ctypes.c_void_p * n)(*(each.data_ptr() for each in scale)),
        n,
        count,
        max(1, min(bucket, count)),
        out.data_ptr(),
    )
    return out
