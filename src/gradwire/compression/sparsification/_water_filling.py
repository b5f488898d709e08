"""The number of elements to keep of each layer, for a total number of bits.

Keeping the k largest elements of a layer of n costs R(k) = k * value_bits + the bits of their
positions, about n h(k/n) with the binary entropy h, and saves the sum S(k) of their squares. The
total error is least, for the bits spent, where every layer minimises its own

    -S_l(k) + lambda R_l(k)                                            (Shoham and Gersho 1988)

with one lambda for all: an element is kept if x^2 > lambda * (value_bits + log2((1 - p) / p)), the
derivative of R at the density p of its layer. That is reverse water-filling (Cover and Thomas 2006,
sec. 10.3.3), with a water level that is lower where a position costs less. In gradients that is
also where large elements cluster, in rows of an embedding or a matrix: there the positions take a
measured multiple of the formula, 0.4 for the matrices of an LSTM.

S and R are known at the edges of a histogram of logarithms of magnitudes, 16 to the octave. R is
concave, so -S + lambda R may have several minima, and all edges are looked at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_OCTAVES = 24  # smaller elements share the last bin
_SHIFT = 23 - 4  # mantissa bits of float32 that a bin does not tell apart
_NUM_BINS = _OCTAVES << 4
_ONE = 0x3F800000  # the bits of 1.0
# Rice's code comes this close to the entropy of geometric gaps, in nats here.
_CODE_LOSS = 1.03 / math.log(2)
_GROUP_BITS = 32  # count, length and mode of a code, and what it is rounded up to
# log2 of prices at which nothing is worth it, and the smallest elements that bins tell apart.
_HIGHEST, _LOWEST = 0.0, -60.0
_STEPS = 12  # of a bisection between them, to less than the width of a bin
_SHARES = 256


@dataclass(frozen=True, slots=True)
class Histogram:
    """Magnitudes of each layer, the largest first; a magnitude is that over `largest`."""

    counts: Tensor  # float64 [num_layers, num_bins]: estimates, if of a sample
    sizes: Tensor  # float64 [num_layers]: elements
    largest: float

    @staticmethod
    def of(values: Tensor, taken: Sequence[int], sizes: Sequence[int]) -> "Histogram":
        """Of `taken` values from each layer, which stand for `sizes` if they are a sample."""
        largest = float(values.abs().max()) if values.numel() else 0.0
        elements = torch.tensor(sizes, dtype=torch.float64)
        if not largest:
            return Histogram(elements.new_zeros(len(taken), _NUM_BINS), elements, 0.0)
        relative = (values.abs() / largest).to(torch.float32)
        bins = ((_ONE - relative.view(torch.int32)) >> _SHIFT).clamp_(0, _NUM_BINS - 1)
        # One call for each layer takes less than telling every element which one is its own.
        each = [torch.bincount(own, minlength=_NUM_BINS) for own in bins.split(list(taken))]
        counts = torch.stack(each).cpu().double()
        if bool(counts[:, -1].any()):  # with zeros, which are never worth anything
            zeros = [int((own == 0).sum()) for own in relative.split(list(taken))]
            counts[:, -1] -= torch.tensor(zeros, dtype=torch.float64)
        return Histogram(counts, elements, largest)

    def scaled(self, factors: Tensor) -> "Histogram":
        return Histogram(self.counts * factors[:, None], self.sizes, self.largest)


@lru_cache
def edges() -> Tensor:
    """Upper edges of the bins and the lower one of the last, in terms of the largest: float64."""
    steps = torch.arange(_NUM_BINS + 1, dtype=torch.int32)
    return (_ONE - (steps << _SHIFT)).view(torch.float32).double()


def position_bits(kept: Tensor, sizes: Tensor) -> Tensor:
    """About the bits that the positions of `kept` elements of `sizes` take; those of all none."""
    rest = sizes - kept
    nats = torch.xlogy(sizes, sizes) - torch.xlogy(kept, kept) - torch.xlogy(rest, rest)
    return torch.minimum(nats.clamp_(min=0) * _CODE_LOSS, sizes)


def message_bits(kept: Tensor, sizes: Tensor, value_bits: float, factors: Tensor) -> Tensor:
    """About the bits of a layer's part of the message."""
    return kept * value_bits + factors * position_bits(kept, sizes)


def group_starts(kept: Sequence[int], sizes: Sequence[int], factors: Sequence[float]) -> list[int]:
    """Where to cut layers into groups with one code of positions each: the first layers of all.

    Layers of about equal density are cheaper together. Looks at one layer after the other.
    """
    firsts = [0]
    count, size = kept[0], sizes[0]
    for layer in range(1, len(kept)):
        both = layer_bits(count + kept[layer], size + sizes[layer])
        apart = layer_bits(count, size) + layer_bits(kept[layer], sizes[layer])
        if (both - apart) * min(factors[layer - 1 : layer + 1]) <= _GROUP_BITS:
            count, size = count + kept[layer], size + sizes[layer]
        else:
            firsts.append(layer)
            count, size = kept[layer], sizes[layer]
    return firsts


def layer_bits(kept: int, size: int) -> float:
    """`position_bits` of one layer."""
    nats = sum(n * math.log(size / n) for n in (kept, size - kept) if n)
    return min(nats * _CODE_LOSS, size)


def num_worth_keeping(
    histogram: Histogram, value_bits: float, budget_bits: float, factors: Sequence[float]
) -> Tensor:
    """How many elements to keep of each layer for about so many bits: int64 [num_layers].

    `factors` are what positions take in terms of `position_bits`: less than 1 if they cluster.
    """
    counts, sizes = histogram.counts, histogram.sizes
    upper = edges()
    squares = ((upper[1:] + upper[:-1]) / 2).square()
    nothing = counts.new_zeros(len(counts), 1)
    kept = torch.cat([nothing, counts.cumsum(1)], dim=1)  # [num_layers, num_bins + 1]
    kept = torch.minimum(kept, sizes[:, None])
    saved = torch.cat([nothing, (counts * squares).cumsum(1)], dim=1)
    scale = torch.tensor(factors, dtype=torch.float64)
    bits = message_bits(kept, sizes[:, None], value_bits, scale[:, None])
    every = kept[:, -1]
    if float(bits[:, -1].sum()) <= budget_bits:
        return every.long()

    def best(price: float) -> Tensor:
        return (saved - price * bits).argmax(dim=1, keepdim=True)

    low, high = _LOWEST, _HIGHEST
    under, over = nothing[:, 0], every
    for _ in range(_STEPS):
        middle = (low + high) / 2
        edge = best(2.0**middle)
        here = kept.gather(1, edge)[:, 0]
        if float(bits.gather(1, edge).sum()) <= budget_bits:
            high, under = middle, here
        else:
            low, over = middle, here
    # What lies between two edges: the same share of each layer's step.
    shares = torch.linspace(0, 1, _SHARES + 1, dtype=torch.float64)
    between = under + shares[:, None] * (over - under)  # [num_shares, num_layers]
    fits = message_bits(between, sizes, value_bits, scale).sum(dim=1) <= budget_bits
    return between[int(fits.nonzero().max()) if bool(fits.any()) else 0].long()


def least_magnitudes(histogram: Histogram, kept: Sequence[int]) -> list[float]:
    """For each layer a magnitude that about `kept` elements reach, on an edge and no fewer."""
    reached = histogram.counts.cumsum(1)
    upper = edges()
    # The first bin after which there are enough; its lower edge. The last one has no lower edge.
    wanted = torch.tensor(kept, dtype=torch.float64)
    enough = (reached < wanted[:, None]).sum(dim=1)
    lower = torch.cat([upper[1:-1], upper.new_zeros(2)])
    lower = torch.where(wanted > 0, lower[enough], upper[0])
    return [float(edge) * histogram.largest for edge in lower]
