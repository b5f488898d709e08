"""Quantisation by `dq` where a plane of bits selects the quantiser of each element.

The plane is a word of a polar code C (`coding/plane.py`): the points that it leaves are the lattice
2Z^n + C (Construction A; Conway and Sloane 1999, ch. 5), whose cells are nearer to balls than those
of eight states. It is found like the path in a trellis, by error and rate: the ratio of an element
is the difference in cost between its best indices in the two quantisers. The weight of a bit
follows from the scale s of the ratios: in p(y | x) ~ exp(-s (x - y)^2) p(y) a bit costs log(2) / s.

The sender decides whether zero is a value of quantiser 1. Near zero both quantisers should have it;
among large elements it would waste a quarter of the bits.
"""

import math

from torch import Tensor

from gradwire import kernels
from gradwire.coding.plane import encode_plane
from gradwire.kernels.reference.trellis import UNIT
from gradwire.kernels.reference.trellis_fit import (
    MOST_RATE,
    Fit,
    offsets_of,
    rates,
)

_WEIGHT = math.log(2) / 4 * UNIT**2  # of a bit: s is 4 to a squared step


def plane_fit(
    scaled: Tensor,
    shapes: Tensor,
    segments: int,
    levels: Tensor | None,
    offsets: Tensor,
    large: int,
    passes: int,
    stride: int,
) -> tuple[Fit, Tensor]:
    """As `kernels.trellis_fit`, and the plane that travels; no zero from class `large` on."""
    contexts, counts, _ = kernels.trellis_contexts(scaled, None, shapes, segments)
    is_given = levels is not None
    if levels is None:
        odd = counts[1::2]
        odd[large:, 1] += odd[large:, 0]
        odd[large:, 0] = 0
        levels = kernels.trellis_tables(counts)[0]
    for _ in range(passes):
        costs = rates(levels, False, _WEIGHT)
        costs[4, large:] = MOST_RATE
        ratios = kernels.plane_ratios(scaled, contexts, costs, offsets)
        packed, plane = encode_plane(ratios)
        indices, contexts, counts, errors = kernels.plane_choose(
            scaled, plane, costs, offsets, shapes, segments
        )
        (coded, text, size), moved = kernels.trellis_tables(counts), offsets_of(errors)
        if not is_given:
            levels, offsets = coded, moved
    error, energy = kernels.trellis_squares(scaled, indices, contexts, moved, stride)
    return (indices, contexts, coded, moved, text, size, error, energy), packed
