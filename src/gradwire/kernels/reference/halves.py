"""float32 to a 16-bit float, saturating, and whether all of it was finite."""

import torch
from torch import Tensor


def narrow(x: Tensor, out: Tensor) -> bool:
    largest = torch.finfo(out.dtype).max
    out.copy_(x).clamp_(-largest, largest)
    return bool(torch.isfinite(x).all())
