"""Sums over a whole vector."""

import torch
from torch import Tensor

from gradwire.kernels._dispatch import InTriton, pick
from gradwire.kernels.native import moments as native
from gradwire.kernels.reference import moments as reference
from gradwire.kernels.reference.moments import Tails

_triton = InTriton("moments")


def moments(x: Tensor) -> tuple[float, float]:
    """The sum of the elements and that of their squares, added up in float64."""
    if not x.numel():
        return 0.0, 0.0
    fused = native.moments if x.dtype == torch.float32 else reference.moments
    run = pick(x.device, fused, reference.moments, _triton.moments)
    return run(x.reshape(-1))


def tails(x: Tensor, threshold: float) -> Tails:
    """How many elements lie at or beyond plus and minus `threshold`, and what magnitudes add up to.

    The threshold is that of x's dtype: it is rounded to it, and zero lies inside every one.
    """
    if not threshold >= 0:
        raise ValueError(f"tails takes a threshold of at least 0, got {threshold}")
    if not x.numel():
        return Tails(0, 0, 0.0, 0.0)
    limits = torch.finfo(x.dtype)
    least = limits.tiny * limits.eps  # the smallest number above zero
    # Saturating: a float too large for x's dtype is infinity to it, which nothing finite reaches.
    rounded = torch.tensor(min(threshold, 2 * limits.max), dtype=torch.float64).to(x.dtype)
    fused = native.tails if x.dtype == torch.float32 else reference.tails
    run = pick(x.device, fused, reference.tails, _triton.tails)
    return run(x.reshape(-1), max(least, float(rounded)))
