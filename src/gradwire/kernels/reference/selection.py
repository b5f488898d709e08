"""Elements of large magnitude: feedback, selection and the new residual.

NaN counts as larger than any number, so that a caller finds it among what was selected.
"""

import torch
from torch import Tensor

from gradwire.kernels._motion import Motion, Residual, with_residual
from gradwire.kernels.reference.strata import strata_positions


def select_largest(
    x: Tensor, residual: Residual | None, count: int, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    p = with_residual(x, residual)
    magnitude = _magnitude(p)
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


def select_sampled(
    x: Tensor,
    residual: Residual | None,
    sample: int,
    rank: int,
    seed: int,
    stream: tuple[int, int, int],
    most: int,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    p = with_residual(x, residual)
    positions = strata_positions(p.numel(), sample, seed, stream, p.device)
    sampled, magnitude = _magnitude(p[positions]), _magnitude(p)
    threshold = torch.topk(sampled, rank, sorted=False).values.min()
    indices = ((magnitude >= threshold) & (magnitude > 0)).nonzero().reshape(-1)
    if len(indices) > most:
        indices = indices[select_largest(p[indices], None, most, None)[0]]
    return _taken(x, residual, p, indices, out)


def _magnitude(p: Tensor) -> Tensor:
    return p.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


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
