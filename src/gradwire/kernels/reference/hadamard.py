"""The fast Walsh-Hadamard transform of each row, randomised by signs, and signs of the result.

H_1 = 1,   H_2n = [[H_n, H_n], [H_n, -H_n]] / sqrt(2):   orthonormal, symmetric, its own inverse.
log2 n stages of butterflies (a, b) -> (a + b, a - b), between elements 1, 2, 4 ... apart. The
factor 1/sqrt(n) comes first, so that no stage leaves the range that the result needs.

Norms are added in float64 along a tree that folds a row in halves, since the order of torch's own
sums depends on the processor: this one gives the same bits everywhere.
"""

import math

import torch
from torch import Tensor

from gradwire.kernels.reference.bits import pack_uints, unpack_signs, unpack_uints


def factor(n: int) -> float:
    """1 / sqrt(n), exact where n is a power of four."""
    stages = n.bit_length() - 1
    return 2.0 ** -(stages // 2) * (math.sqrt(0.5) if stages % 2 else 1.0)


def hadamard(
    x: Tensor, before: Tensor | None, after: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """[rows, n]; `before` and `after` are packed bits that flip signs, row after row."""
    rows, n = x.shape
    y = x * factor(n)
    if before is not None:
        y = y * unpack_signs(before, x.numel(), x.dtype).reshape(rows, n)
    h = 1
    while h < n:
        pairs = y.reshape(rows, n // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack([a + b, a - b], dim=2)
        h *= 2
    y = y.reshape(rows, n)
    if after is not None:
        y = y * unpack_signs(after, x.numel(), x.dtype).reshape(rows, n)
    return y if out is None else out.copy_(y)


def row_norms(y: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of |y| and of y^2 over each row of [rows, n], float64."""
    n = y.shape[1]
    magnitude = torch.nn.functional.pad(
        y.abs().to(torch.float64), (0, (1 << (n - 1).bit_length()) - n)
    )
    return _fold(magnitude), _fold(magnitude.square())


def rotated_signs(x: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = hadamard(x, before, None)
    return pack_uints((y >= 0).reshape(-1), 1), *row_norms(y)


def unrotated_signs(
    packed: Tensor, scale: Tensor, n: int, after: Tensor, out: Tensor | None = None
) -> Tensor:
    signs = 2 * unpack_uints(packed, 1, len(scale) * n).reshape(-1, n) - 1
    return hadamard(signs * scale[:, None], None, after, out)


def _fold(rows: Tensor) -> Tensor:
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]
