"""Elements of large magnitude: feedback, selection and the new residual.

NaN counts as larger than any number, so that a caller finds it among what was selected.
"""

import torch
from torch import Tensor

from gradwire.kernels._motion import Motion, Residual, with_residual


def select_largest(
    x: Tensor, residual: Residual | None, count: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    p = with_residual(x, residual)
    magnitude = p.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    if not count:
        indices = torch.zeros(0, dtype=torch.int64, device=p.device)
    else:
        least = torch.topk(magnitude, count, sorted=False).values.min()
        chosen = magnitude > least
        ties = (magnitude == least).nonzero().reshape(-1)
        chosen[ties[: count - int(chosen.sum())]] = True
        indices = chosen.nonzero().reshape(-1)
    return _taken(x, residual, p, indices, out)


def select_above(
    x: Tensor, residual: Residual | None, threshold: float, capacity: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    p = with_residual(x, residual)
    return _taken(x, residual, p, (~(p.abs() < threshold)).nonzero().reshape(-1), out)


def _taken(
    x: Tensor, residual: Residual | None, p: Tensor, indices: Tensor, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    if out is not None:
        out.copy_(p)
        out[indices] = 0
    if isinstance(residual, Motion):
        residual.moved.copy_(residual.step(x)[0])
        if residual.masks:
            residual.moved[indices] = 0
    return indices, p[indices]
