"""Quantisation in which a plane of bits, not a trellis, selects the quantiser of each element.

Quantisers, values, contexts and the code are those of reference/trellis.py, but that q is bit i of
the plane for element i, whatever the indices are, and that a context remembers sizes |k| - q / 2
(0 for k = 0): what the value is in terms of two steps. The plane is a word of a polar code, found
from the ratio of each element:

    ratio = (least cost in quantiser 1 - least cost in quantiser 0) / 128,   rounded, in -127 .. 127

where a cost is a squared error plus a rate, in squared 1/64 steps. That is 4 nats to a squared
step, at 8 units to a nat: with it, uniform numbers have their least error for the bits of the plane
and the distance of its points (see `coding/plane.py`). A cost is looked for at 0 and at the two
indices around the number; of equal costs the lower index is taken.

Given the plane, indices are chosen one after the other, each in the context that those before
have led to: no later one depends on it but through contexts.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.reference.polar import polar_quantise, polar_transform
from gradwire.kernels.reference.trellis import CLASSES, STEEPEST, UNIT, ContextModel, segment_starts

_MAX_DISTANCE, _RATIO_SHIFT, _MAX_RATIO = 16383, 7, 127


class Piece(NamedTuple):
    """Blocks of a plane that have a code in common, position by position, side by side."""

    ratios: Tensor  # int8 [n, lanes]
    kinds: Tensor  # uint8 [2 n], of `polar_kinds`
    order: Tensor  # int64 [n]: position i of the code is position order[i] of the piece


def plane_ratios(scaled: Tensor, contexts: Tensor, rates: Tensor, offsets: Tensor) -> Tensor:
    u = scaled.abs().to(torch.int64)
    own = rates.to(torch.int64)[:, (contexts >> 1).long()]
    even, _ = _cheapest(u, 0, own[:4], offsets[:3])
    odd, _ = _cheapest(u, 1, own[4:], offsets[3:])
    ratios = (odd - even + (1 << (_RATIO_SHIFT - 1))) >> _RATIO_SHIFT
    return ratios.clamp_(-_MAX_RATIO, _MAX_RATIO).to(torch.int8)


def _cheapest(u: Tensor, q: int, rate: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    best, index = u.clamp(max=_MAX_DISTANCE).square() + rate[0], torch.zeros_like(u)
    floor = (u + UNIT * q) >> 7
    for k in (floor, floor + 1):
        offset = torch.where(k == 1, offsets[0], torch.where(k == 2, offsets[1], offsets[2]))
        slope = rate[3] * (k.clamp(max=STEEPEST) - 2)
        cost = (u - (2 * UNIT * k - UNIT * q - offset)).square()
        cost = cost + torch.where(k == 1, rate[1], rate[2] + slope)
        better = (k > 0) & (cost < best)
        best, index = torch.where(better, cost, best), torch.where(better, k, index)
    return best, index


def plane_words(pieces: Sequence[Piece]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for ratios, kinds, order in pieces:
        word = polar_quantise(ratios[order].unsqueeze(0), kinds, True)
        found.append((polar_transform(word)[0], word[0, torch.argsort(order)]))
    return found


def plane_choose(
    scaled: Tensor, plane: Tensor, rates: Tensor, offsets: Tensor, shapes: Tensor, segments: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tensors = [(int(rows), int(width)) for rows, width in shapes.tolist()]
    u = scaled.abs().to(torch.int64)
    # What would be chosen in either quantiser and every class: [2, CLASSES, count].
    wide = rates.to(torch.int64).view(2, 4, CLASSES, 1)
    found = torch.stack([_cheapest(u, q, wide[q], offsets[3 * q :])[1] for q in (0, 1)]).tolist()
    numbers, bits = scaled.tolist(), plane.tolist()
    indices, contexts = [], []
    counts = [[0] * 4 for _ in range(2 * CLASSES)]
    errors = [[0] * 2 for _ in range(6)]
    for first, last in itertools.pairwise(segment_starts(len(numbers), segments)):
        model = ContextModel(tensors, first)
        for i in range(first, last):
            model.state = q = bits[i >> 3] >> (i & 7) & 1
            context = model.context()
            k = found[q][context >> 1][i]
            indices.append(-k if numbers[i] < 0 else k)
            contexts.append(context)
            counts[context][min(k, 2)] += 1
            counts[context][3] += k - min(k, 2)
            if k:
                error = errors[3 * q + min(k, 3) - 1]
                error[0] += 1
                error[1] += 2 * UNIT * k - UNIT * q - abs(numbers[i])
            model.learn_value(k, q)
    return (
        torch.tensor(indices, dtype=torch.int32, device="cpu"),
        torch.tensor(contexts, dtype=torch.uint8, device="cpu"),
        torch.tensor(counts, dtype=torch.int64, device="cpu"),
        torch.tensor(errors, dtype=torch.int64, device="cpu"),
    )
