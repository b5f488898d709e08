"""Density evolution on a bounded alphabet: how much of each input the channel leaves unknown.

Tal and Vardy 2013, "How to construct polar codes". A symmetric channel is a mixture of binary
symmetric channels: with probability p_j the bit passes BSC(e_j). A step combines two copies,

    first half     p_a p_b:  BSC(e_a (1 - e_b) + (1 - e_a) e_b)
    second half    both agree, p_a p_b (e_a e_b + (1 - e_a)(1 - e_b)):  wrong if both are;
                   they differ, p_a p_b (e_a (1 - e_b) + (1 - e_a) e_b):  wrong if the better is

and the squared alphabet is merged: channels in one bin become the one BSC of their mean error. What
comes out is never better than the channel it stands for, so the entropies here are upper bounds.

The paper merges, greedily, the neighbours that lose the least. Here bins are fixed, as in Pedarsani
et al. 2011, though in steps of asinh(20 L) of the ratio L = log((1 - e) / e), not of entropy:
all channels of a level are merged at once, and good and bad ones both keep their digits.
"""

import math

import torch
from torch import Tensor

BINS = 64
_MAX_NATS = 60.0  # nats; what lies beyond shares the last bin
_SCALE = 20.0
_CHUNK_ELEMENTS = 1 << 22  # elements at a time


def scores(n: int, distortion: float, bins: int = BINS) -> Tensor:
    """An upper bound on the entropy of each input given those before it, in bits, float64 [n]."""
    masses, wrong = (torch.zeros(1, bins, dtype=torch.float64, device="cpu") for _ in range(2))
    masses[0, 0], wrong[0, 0] = 1.0, distortion
    while len(masses) < n:
        pieces = [_step(p, w) for p, w in zip(*(x.split(_channels(bins)) for x in (masses, wrong)))]
        masses, wrong = (torch.cat(parts) for parts in zip(*pieces))
    return entropy(masses, wrong)


def entropy(masses: Tensor, wrong: Tensor) -> Tensor:
    """Of channels [channels, bins], in bits."""
    right = masses - wrong
    terms = torch.xlogy(masses, masses) - torch.xlogy(wrong, wrong) - torch.xlogy(right, right)
    return terms.sum(dim=1) / math.log(2)


def _channels(bins: int) -> int:
    return max(1, _CHUNK_ELEMENTS // (bins * bins))


def _step(masses: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """[channels, bins] to [2 channels, bins]: the first and second half of each."""
    bins = masses.shape[1]
    i, j = torch.triu_indices(bins, bins, device="cpu")
    twice = torch.where(i == j, 1.0, 2.0)  # (i, j) and (j, i) are alike
    right = masses - wrong
    both_right, both_wrong = right[:, i] * right[:, j] * twice, wrong[:, i] * wrong[:, j] * twice
    one, other = right[:, i] * wrong[:, j] * twice, wrong[:, i] * right[:, j] * twice
    agree, differ = both_right + both_wrong, one + other
    first = _merge(agree + differ, differ, bins)
    second = _merge(
        torch.cat([agree, differ], dim=1),
        torch.cat([both_wrong, torch.minimum(one, other)], dim=1),
        bins,
    )
    return tuple(torch.stack(pair, dim=1).flatten(0, 1) for pair in zip(first, second))  # type: ignore[return-value]


def _merge(masses: Tensor, wrong: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    ratios = torch.log((masses - wrong) / wrong).nan_to_num(nan=0.0, posinf=_MAX_NATS)
    place = torch.asinh(_SCALE * ratios.clamp(0, _MAX_NATS)) / math.asinh(_SCALE * _MAX_NATS)
    index = (place * bins).to(torch.int64).clamp(max=bins - 1)
    empty = masses.new_zeros(len(masses), bins)
    return empty.scatter_add(1, index, masses), empty.scatter_add(1, index, wrong)
