"""Rounding at random to levels, in C: the bits of reference/levels.py, exactly."""

import torch
from torch import Tensor

from gradwire.kernels._pool import empty
from gradwire.kernels.native._library import dense, parallel, pointer

_CPU = torch.device("cpu")
_MASK = 0xFFFFFFFF


def encode_levels(
    x: Tensor,
    residual: Tensor | None,
    num_levels: int,
    bucket: int,
    width: int,
    seed: int,
    stream: tuple[int, int, int],
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    x, residual = dense(x), None if residual is None else dense(residual)
    count = x.numel()
    scale = torch.empty(-(-count // bucket), dtype=torch.float32, device=_CPU)
    packed = empty(-(-count * width // 8), torch.uint8)
    if parallel().gw_encode_levels(
        x.data_ptr(),
        pointer(residual),
        count,
        bucket,
        num_levels,
        width,
        seed & 0xFFFFFFFFFFFFFFFF,
        *(word & _MASK for word in stream),
        scale.data_ptr(),
        packed.data_ptr(),
        pointer(out),
    ):
        scale.fill_(torch.inf)  # it stopped at the first bucket that is not finite
    return scale, packed


def decode_levels(
    packed: Tensor,
    scale: Tensor,
    num_levels: int,
    bucket: int,
    width: int,
    count: int,
    out: Tensor | None,
    checked: bool = True,
) -> tuple[Tensor, int]:
    packed, scale = dense(packed), dense(scale)
    if out is None:
        out = empty(count)
    highest: int = parallel().gw_decode_levels(
        packed.data_ptr(),
        scale.data_ptr(),
        count,
        bucket,
        num_levels,
        width,
        out.data_ptr(),
    )
    return out, highest
