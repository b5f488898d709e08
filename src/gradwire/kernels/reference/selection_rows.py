"""A sampled selection of each row of a matrix."""

from collections.abc import Sequence

from torch import Tensor

from gradwire.kernels._motion import Residual, row_of_residual
from gradwire.kernels.reference.selection import select_sampled


def select_sampled_rows(
    x: Tensor,
    residual: Residual | None,
    sample: int,
    rank: int,
    keys: Sequence[tuple[int, tuple[int, int, int]]],
    most: int,
    out: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    chosen = []
    for r, (seed, stream) in enumerate(keys):
        owed, left = row_of_residual(residual, r), None if out is None else out[r]
        chosen.append(select_sampled(x[r], owed, sample, rank, seed, stream, most, left))
    return chosen
