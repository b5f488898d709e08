"""Sums over a whole vector, in float64 along the tree of tables.py: the same bits everywhere."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.reference.tables import sum_rows


class Tails(NamedTuple):
    """A vector cut at plus and minus a threshold."""

    num_above: int  # x >= threshold
    num_below: int  # x <= -threshold
    outer: float  # the sum of magnitudes of both
    inner: float  # the sum of magnitudes of the others


def moments(x: Tensor) -> tuple[float, float]:
    wide = x.to(torch.float64)[None]
    return float(sum_rows(wide)), float(sum_rows(wide.square()))


def tails(x: Tensor, threshold: float) -> Tails:
    magnitude = x.abs()
    outside = magnitude >= threshold
    outer, inner = (
        float(sum_rows(magnitude.masked_fill(hidden, 0.0).to(torch.float64)[None]))
        for hidden in (~outside, outside)
    )
    return Tails(int((outside & (x > 0)).sum()), int((outside & (x < 0)).sum()), outer, inner)
