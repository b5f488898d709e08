"""Indices of a trellis-coded quantiser and tables that fit each other.

The search takes the rates of tables and moves values by offsets, and both are made of the indices
that it finds. So the fit iterates: contexts of rounded numbers, their tables, then `rounds` times
search and count on some blocks of a long vector, then `passes` times on all of it, with contexts of
the indices found. If tables are given, every search uses those.
"""

import functools
import math

import torch
from torch import Tensor

from gradwire.kernels.reference import trellis
from gradwire.kernels.reference.trellis import BLOCK, CLASSES, PRECISION, TAIL_PRECISION, UNIT
from gradwire.kernels.reference.trellis_search import trellis_search
from gradwire.kernels.reference.trellis_tables import (
    HALF,
    LEVEL,
    event_bits,
    halves,
    tail,
    trellis_tables,
)

FINE = 4  # offsets are multiples of 4/64 of a step, -8 .. 7 times
LAMBDA = 0.27  # squared steps per bit
OFFSET_BITS = 24  # that offsets cost, and must gain
MOST_RATE = 1 << 17
Fit = tuple[Tensor, Tensor, Tensor, Tensor, str, float, float, float]


def trellis_fit(
    scaled: Tensor,
    shapes: Tensor,
    segments: int,
    levels: Tensor | None,
    offsets: Tensor,
    signed: bool,
    rounds: int,
    passes: int,
    stride: int,
) -> Fit:
    contexts, counts, _ = trellis.trellis_contexts(scaled, None, shapes, segments)
    is_given = levels is not None
    if levels is None:
        some, where = blocks(scaled, stride), blocks(contexts, stride)
        if signed:  # then there is no zero in quantiser 1
            counts[1::2, 1] += counts[1::2, 0]
            counts[1::2, 0] = 0
        levels = trellis_tables(counts)[0]
        for _ in range(rounds):
            indices = trellis_search(some, where, rates(levels, signed), offsets, signed)
            counts, errors = trellis.trellis_counts(some, indices, where, signed)
            levels, offsets = trellis_tables(counts)[0], offsets_of(errors)
    for _ in range(passes):
        indices = trellis_search(scaled, contexts, rates(levels, signed), offsets, signed)
        contexts, counts, errors = trellis.trellis_contexts(
            scaled, indices, shapes, segments, signed
        )
        (coded, text, size), moved = trellis_tables(counts), offsets_of(errors)
        if not is_given:
            levels, offsets = coded, moved
    error, energy = trellis_squares(scaled, indices, contexts, moved, stride)
    return indices, contexts, coded, moved, text, size, error, energy


def trellis_scale(x: Tensor, factor: float, most: int) -> Tensor:
    return (x * factor).round_().clamp_(-most, most).to(torch.int32)


def trellis_range(x: Tensor) -> tuple[int, int]:
    low, high = torch.aminmax(x)
    return int(low), int(high)


def trellis_squares(
    scaled: Tensor, indices: Tensor, contexts: Tensor, offsets: Tensor, stride: int
) -> tuple[float, float]:
    own = blocks(scaled, stride), blocks(indices, stride), blocks(contexts, stride)
    return squares(*own, offsets)


def blocks(x: Tensor, stride: int) -> Tensor:
    """One block of every `stride`; blocks are searched separately."""
    return x if stride < 2 else x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)[::stride].flatten()


def rates(levels: Tensor, signed: bool, weight: float = LAMBDA * UNIT**2) -> Tensor:
    """int32 [8, CLASSES] for the search: of 0, of 1, of 2 and of one more, by quantiser."""
    a, b, c = (levels.long() + LEVEL).unbind(dim=1)
    bits = symbol_bits()[a, b]
    own = torch.cat([bits[:, :2], bits[:, 2:] + tail_bits()[c, :1], tail_bits()[c, 1:]], dim=1)
    weighted = (own.view(CLASSES, 8).T * weight).round().to(torch.int32)
    weighted.clamp_(max=MOST_RATE)
    if signed:
        weighted[4] = MOST_RATE  # no zero in quantiser 1: it would cancel the gain of signs
    return weighted


@functools.cache
def symbol_bits() -> Tensor:
    """Of 0, of +1 and of +more, by the first two levels: float64 [levels, levels, 3]."""
    every = range(-LEVEL, LEVEL + 1)
    own = torch.tensor(
        [[halves(a, b) for b in every] for a in every], dtype=torch.float64, device="cpu"
    )
    zero = 2 * (HALF - own.sum(dim=2, keepdim=True))
    return PRECISION - torch.cat([zero, own], dim=2).log2()


@functools.cache
def tail_bits() -> Tensor:
    """Of the tail 0 and of one more, by the third level: float64 [levels, 2]."""
    every = range(-LEVEL, LEVEL + 1)
    own = [(TAIL_PRECISION - math.log2(tail(level)[0]), event_bits(level)) for level in every]
    return torch.tensor(own, dtype=torch.float64, device="cpu")


def offsets_of(errors: Tensor) -> Tensor:
    """How far values move towards zero to be the means of what they stand for (int32 [6])."""
    rows = errors.tolist()
    moved = [FINE * min(max(round(total / (FINE * max(1, n))), -8), 7) for n, total in rows]
    # In squared 1/64 steps, each gain is n times (2 total / n - move) move.
    gain = sum(move * (2 * total - n * move) for (n, total), move in zip(rows, moved))
    pays = gain > OFFSET_BITS * (LAMBDA * UNIT**2)
    return torch.tensor(moved if pays else [0] * 6, dtype=torch.int32, device="cpu")


def squares(
    scaled: Tensor, indices: Tensor, contexts: Tensor, offsets: Tensor
) -> tuple[float, float]:
    """The squared error and the energy, summed block by block."""
    magnitude, q = indices.abs(), contexts.to(torch.int32) & 1
    values = 2 * UNIT * magnitude - UNIT * q - offsets[3 * q + magnitude.clamp(1, 3) - 1]
    values = torch.where(indices < 0, -values, values) * (indices != 0)
    error = energy = 0.0
    for own, x in zip((values - scaled).split(BLOCK), scaled.split(BLOCK)):
        error += int(own.long().square().sum())
        energy += int(x.long().square().sum())
    return error, energy
