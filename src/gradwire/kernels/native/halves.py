"""float32 to a 16-bit float, and means of those, in C: the bits of reference/halves.py, exactly."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.native._library import dense, parallel
from gradwire.kernels.reference import halves as reference


def narrow(x: Tensor, out: Tensor) -> bool:
    x = dense(x)
    library = parallel()
    cast = library.gw_cast_bf16 if out.dtype == torch.bfloat16 else library.gw_cast_fp16
    status: int = cast(x.data_ptr(), x.numel(), out.data_ptr())
    # Minus one: this processor has no instruction for it.
    return reference.narrow(x, out) if status < 0 else status == 0


def narrow_sum(x: Tensor, residual: Tensor, out: Tensor, lost: Tensor) -> bool:
    is_finite = narrow(torch.add(x, residual, out=lost), out)
    lost.sub_(out)
    return is_finite


def mean_halves(pieces: Sequence[Tensor], count: int, out: Tensor) -> Tensor:
    pieces = [dense(piece) for piece in pieces]
    addresses = array("Q", (piece.data_ptr() for piece in pieces))
    library = parallel()
    mean = library.gw_mean_bf16 if out.dtype == torch.bfloat16 else library.gw_mean_fp16
    where, _ = addresses.buffer_info()
    status: int = mean(where, len(pieces), count, out.numel(), out.data_ptr())
    return reference.mean_halves(pieces, count, out) if status < 0 else out
