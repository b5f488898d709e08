"""The tables that code counted indices shortest: levels, how they are written, and the total.

See `coding/trellis.py` for what a level is. Of each grouping of classes every level is chosen by
itself: the one that makes its events and its own code shortest, the lowest of equal ones.
"""

import functools
import itertools
import math

import torch
from torch import Tensor

from gradwire.kernels.reference.trellis import (
    CLASSES,
    DIRECT,
    PRECISION,
    TAIL_PRECISION,
    TOKENS,
)

LEVEL = 47  # the largest, and minus the smallest
SHARED = (1, 2, 16)  # classes per table
_LEAST_SHARED = (2048, 512)  # indices from which on the first two of these may pay
HALF = 1 << (PRECISION - 1)
_CUBE_ROOTS = (1 << 20, 1321123, 1664511)  # 2^20 times 1, 2^(1/3), 2^(2/3)

Levels = tuple[int, int, int]  # odds of: not zero; one if not zero; still more if more than one


def trellis_tables(counts: Tensor) -> tuple[Tensor, str, float]:
    total = int(counts[:, :3].sum())
    # Of few indices the finer tables would only take time: they cost more than they save.
    first = sum(total < least for least in _LEAST_SHARED)
    written = [_written(counts, shared) for shared in range(first, len(SHARED))]
    levels, text, size = min(written, key=lambda tables: tables[2])
    return torch.tensor(levels, dtype=torch.int8, device="cpu"), text, size


def _written(counts: Tensor, shared: int) -> tuple[tuple[Levels, ...], str, float]:
    width = SHARED[shared]
    groups = counts.reshape(-1, width, 2, 4).sum(dim=1).tolist()
    used = [g for g, pair in enumerate(groups) if any(map(sum, pair))] or [0]
    first, last = used[0], used[-1]
    bits = [f"{shared:02b}" + (f"{first:04b}{last:04b}" if width < CLASSES else "")]
    levels: dict[tuple[int, int], Levels] = {}
    size = 0.0
    for g in range(first, last + 1):
        for q in (0, 1):
            zeros, ones, more, beyond = groups[g][q]
            expected = expected_levels(levels.get((g - 1, q)), g, width)
            pairs = ((ones + more, zeros), (ones, more), (beyond, more))
            own = []
            for (yes, no), guess in zip(pairs, expected):
                level, cost = _best_level(yes, no, guess)
                own.append(level)
                size += cost
                bits.append(_golomb(level - guess))
            size += ones + more  # signs
            levels[g, q] = (own[0], own[1], own[2])
    return spread(levels, first, last, width), "".join(bits), size + len(bits[0])


def _best_level(yes: int, no: int, guess: int) -> tuple[int, float]:
    """The level that makes so many events and its own code shortest, and the bits of both."""
    nearest = _clamped(round(3 * math.log2((yes + 0.4) / (no + 0.4))))
    best, least = guess, math.inf
    for level in range(min(guess, nearest), max(guess, nearest) + 1):
        cost = yes * event_bits(level) + no * event_bits(-level)
        cost += 2 * (_unsigned(level - guess) + 1).bit_length() - 1
        if cost < least:
            best, least = level, cost
    return best, least


def expected_levels(before: Levels | None, group: int, width: int) -> Levels:
    """The levels to expect after those of the group before."""
    if before is None:
        middle = group * width + (width - 1) // 2
        return _clamped(3 * (middle - CLASSES // 2)), 6, -6
    step = 3 * width
    return _clamped(before[0] + step), _clamped(before[1] - width), _clamped(before[2] + 2 * width)


def spread(
    levels: dict[tuple[int, int], Levels], first: int, last: int, width: int
) -> tuple[Levels, ...]:
    """For each context; those that do not occur have the nearest that does."""
    return tuple(
        levels[min(max(c // width, first), last), q] for c in range(CLASSES) for q in (0, 1)
    )


def _clamped(level: int) -> int:
    return min(max(level, -LEVEL), LEVEL)


def _unsigned(n: int) -> int:
    return 2 * n - 1 if n > 0 else -2 * n


def _golomb(n: int) -> str:
    """0 as 1, then 1 and -1 as 010 and 011, and so on."""
    code = f"{_unsigned(n) + 1:b}"
    return "0" * (len(code) - 1) + code


@functools.cache
def odds(level: int) -> tuple[int, int]:
    """2^(level / 3) as a fraction."""
    octave, third = divmod(level, 3)
    return _CUBE_ROOTS[third] << (octave + 16), 1 << 36


@functools.cache
def event_bits(level: int) -> float:
    """Of an event with the odds of a level."""
    own, one = odds(level)
    return math.log2((own + one) / own)


def _share(total: int, level: int) -> int:
    """`total` times odds / (1 + odds), rounded."""
    own, one = odds(level)
    return (2 * total * own + own + one) // (2 * (own + one))


@functools.cache
def halves(other: int, one: int) -> tuple[int, int]:
    """The frequencies of +1 and of +more."""
    both = min(max(_share(HALF, other), 2), HALF - 1)
    ones = min(max(_share(both, one), 1), both - 1)
    return ones, both - ones


@functools.cache
def tail(level: int) -> tuple[int, ...]:
    """Frequencies of the tokens of a geometric tail."""
    ratio = min(max(_share(1 << 16, level), 1), (1 << 16) - 1)
    powers = [1 << 30]  # ratio^0, ratio^1, ..., ratio^16, ratio^32, ratio^64, ...
    for _ in range(DIRECT):
        powers.append(powers[-1] * ratio >> 16)
    while len(powers) < TOKENS:
        powers.append(powers[-1] * powers[-1] >> 30)
    powers.append(0)
    spare = (1 << TAIL_PRECISION) - TOKENS
    own = [1 + ((a - b) * spare >> 30) for a, b in itertools.pairwise(powers)]
    own[own.index(max(own))] += (1 << TAIL_PRECISION) - sum(own)
    return tuple(own)
