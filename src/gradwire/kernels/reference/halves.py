"""float32 to a 16-bit float, and means of 16-bit floats."""

from collections.abc import Sequence

import torch
from torch import Tensor


def narrow(x: Tensor, out: Tensor) -> bool:
    """Saturating; whether all of it was finite."""
    largest = torch.finfo(out.dtype).max
    out.copy_(x).clamp_(-largest, largest)
    return bool(torch.isfinite(x).all())


def narrow_sum(x: Tensor, residual: Tensor, out: Tensor, lost: Tensor) -> bool:
    """`narrow` of x + residual; what is lost of it into `lost`."""
    is_finite = narrow(torch.add(x, residual, out=lost), out)
    lost.sub_(out)
    return is_finite


def mean_halves(pieces: Sequence[Tensor], count: int, out: Tensor) -> Tensor:
    """Added in order in float32, and rounded once."""
    total = pieces[0].to(torch.float32)
    for piece in pieces[1:]:
        total += piece
    return out.copy_(total.div_(count))
