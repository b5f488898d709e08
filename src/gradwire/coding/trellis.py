"""How likely the indices of a trellis-coded quantiser are: tables that travel in a few bytes.

In a context (see `kernels/reference/trellis.py`) an index is zero or not, if not it is +-1 or more,
and if more it is geometric from 2 on. So a table is three probabilities. Each is written as the
logarithm of its odds in thirds of a bit, minus what the table of the next smaller class leads one
to expect (a class is a factor of two in magnitude), in an exponential Golomb code:

    2 bits: how many classes share a table, 1, 2 or 16; 4 + 4 bits, unless all share one: the first
    and the last group of classes that occur; then per group and quantiser three numbers

The sender takes the levels, and the grouping, with the shortest total of tables and indices. Both
sides make frequencies of levels in integers, so that they agree on every machine.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.kernels.reference.trellis import (
    CLASSES,
    DIRECT,
    PRECISION,
    TAIL_PRECISION,
    TOKENS,
)

_LEVEL = 47  # the largest, and minus the smallest
_SHARED = (1, 2, 16)  # classes per table
_LEAST_SHARED = (2048, 512)  # indices from which on the first two of these may pay
_CUBE_ROOTS = (1 << 20, 1321123, 1664511)  # 2^20 times 1, 2^(1/3), 2^(2/3)
_HALF = 1 << (PRECISION - 1)

Levels = tuple[int, int, int]  # odds of: not zero; one if not zero; still more if more than one


class Tables(NamedTuple):
    """One triple of levels per context, and how they are written."""

    levels: tuple[Levels, ...]  # [2 CLASSES]
    bits: str
    size_bits: float  # of the indices that were counted, together with the tables

    def halves(self) -> Tensor:
        """int32 [2 CLASSES, 2]: the frequencies of +1 and of +more."""
        return torch.tensor([_halves(*own[:2]) for own in self.levels], dtype=torch.int32)

    def tails(self) -> Tensor:
        """int32 [2 CLASSES, TOKENS]."""
        return torch.tensor([_tail(own[2]) for own in self.levels], dtype=torch.int32)

    def rates(self, weight: float) -> Tensor:
        """int32 [8, CLASSES]: bits of 0, of 1, of 2 and of one more, by quantiser, times weight."""
        columns = [[*_bits(*self.levels[2 * c]), *_bits(*self.levels[2 * c + 1])] for c in _ALL]
        return (torch.tensor(columns, dtype=torch.float64).T * weight).round().to(torch.int32)


_ALL = range(CLASSES)


def choose_tables(counts: Tensor) -> Tables:
    """The tables for counts (int64 [2 CLASSES, 4]: zeros, ones, more, sum of what is beyond 2)."""
    total = int(counts[:, :3].sum())
    # Of few indices the finer tables would only take time: they cost more than they save.
    first = sum(total < least for least in _LEAST_SHARED)
    written = [_written(counts, shared) for shared in range(first, len(_SHARED))]
    return min(written, key=lambda tables: tables.size_bits)


def _written(counts: Tensor, shared: int) -> Tables:
    width = _SHARED[shared]
    groups = counts.reshape(-1, width, 2, 4).sum(dim=1).tolist()
    used = [g for g, pair in enumerate(groups) if any(map(sum, pair))] or [0]
    first, last = used[0], used[-1]
    bits = [f"{shared:02b}" + (f"{first:04b}{last:04b}" if width < CLASSES else "")]
    levels: dict[tuple[int, int], Levels] = {}
    size = 0.0
    for g in range(first, last + 1):
        for q in (0, 1):
            zeros, ones, more, beyond = groups[g][q]
            expected = _expected(levels.get((g - 1, q)), g, width)
            pairs = ((ones + more, zeros), (ones, more), (beyond, more))
            own = []
            for (yes, no), guess in zip(pairs, expected):
                level, cost = _best_level(yes, no, guess)
                own.append(level)
                size += cost
                bits.append(_golomb(level - guess))
            size += ones + more  # signs
            levels[g, q] = (own[0], own[1], own[2])
    text = "".join(bits)
    return Tables(_spread(levels, first, last, width), text, size + len(bits[0]))


def read_tables(packed: Tensor) -> tuple[Tables, int]:
    """The tables at the front of bytes, and how many bytes they take."""
    # No more than 96 numbers of at most 15 bits.
    text = "".join(f"{byte:08b}" for byte in packed[:256].tolist())
    stream = iter(text)
    shared, first, last = _number(stream, 2), 0, 0
    if shared >= len(_SHARED):
        raise WireError(f"tables of grouping {shared}")
    width, used = _SHARED[shared], 2
    if width < CLASSES:
        first, last, used = _number(stream, 4), _number(stream, 4), 10
    if not first <= last < CLASSES // width:
        raise WireError(f"tables of classes {first} .. {last}, grouping {shared}")
    levels: dict[tuple[int, int], Levels] = {}
    for g in range(first, last + 1):
        for q in (0, 1):
            own = []
            for guess in _expected(levels.get((g - 1, q)), g, width):
                difference, length = _golomb_read(stream)
                used += length
                own.append(guess + difference)
                if abs(own[-1]) > _LEVEL:
                    raise WireError(f"a table with odds of {own[-1]} / 3 bits")
            levels[g, q] = (own[0], own[1], own[2])
    size = -(-used // 8)
    if "1" in text[used : 8 * size]:
        raise WireError("tables: padding that is not zero")
    return Tables(_spread(levels, first, last, width), text[:used], 0.0), size


def to_bytes(bits: str) -> bytes:
    """A text of 0 and 1, padded with zeros."""
    padded = bits + "0" * (-len(bits) % 8)
    return int(padded, 2).to_bytes(len(padded) // 8, "big") if padded else b""


def _expected(before: Levels | None, group: int, width: int) -> Levels:
    """The levels to expect after those of the group before."""
    if before is None:
        middle = group * width + (width - 1) // 2
        return _clamped(3 * (middle - CLASSES // 2)), 6, -6
    step = 3 * width
    return _clamped(before[0] + step), _clamped(before[1] - width), _clamped(before[2] + 2 * width)


def _clamped(level: int) -> int:
    return min(max(level, -_LEVEL), _LEVEL)


def _spread(
    levels: dict[tuple[int, int], Levels], first: int, last: int, width: int
) -> tuple[Levels, ...]:
    """For each context; those that do not occur have the nearest that does."""
    return tuple(
        levels[min(max(c // width, first), last), q] for c in range(CLASSES) for q in (0, 1)
    )


def _best_level(yes: int, no: int, guess: int) -> tuple[int, float]:
    """The level that makes so many events and its own code shortest, and the bits of both."""
    estimate = round(3 * math.log2((yes + 0.4) / (no + 0.4)))
    nearest = _clamped(estimate)
    best, least = guess, math.inf
    for level in {guess, *range(min(guess, nearest), max(guess, nearest) + 1), nearest}:
        if abs(level) <= _LEVEL:
            cost = yes * _event_bits(level) + no * _event_bits(-level)
            cost += 2 * (_unsigned(level - guess) + 1).bit_length() - 1
            if cost < least:
                best, least = level, cost
    return best, least


def _unsigned(n: int) -> int:
    return 2 * n - 1 if n > 0 else -2 * n


def _golomb(n: int) -> str:
    """0 as 1, then 1 and -1 as 010 and 011, and so on."""
    code = f"{_unsigned(n) + 1:b}"
    return "0" * (len(code) - 1) + code


def _golomb_read(stream: Iterator[str]) -> tuple[int, int]:
    zeros = 0
    while _number(stream, 1) == 0:
        zeros += 1
        if zeros > 7:
            raise WireError("tables: a number that is too large")
    n = (1 << zeros | _number(stream, zeros)) - 1
    return (n + 1) // 2 if n % 2 else -(n // 2), 2 * zeros + 1


def _number(stream: Iterator[str], bits: int) -> int:
    value = 0
    for _ in range(bits):
        bit = next(stream, None)
        if bit is None:
            raise WireError("tables: they end early")
        value = 2 * value + (bit == "1")
    return value


@functools.cache
def _odds(level: int) -> tuple[int, int]:
    """2^(level / 3) as a fraction."""
    octave, third = divmod(level, 3)
    return _CUBE_ROOTS[third] << (octave + 16), 1 << 36


@functools.cache
def _event_bits(level: int) -> float:
    odds, one = _odds(level)
    return math.log2((odds + one) / odds)


def _share(total: int, level: int) -> int:
    """`total` times odds / (1 + odds), rounded."""
    odds, one = _odds(level)
    return (2 * total * odds + odds + one) // (2 * (odds + one))


@functools.cache
def _halves(other: int, one: int) -> tuple[int, int]:
    both = min(max(_share(_HALF, other), 2), _HALF - 1)
    ones = min(max(_share(both, one), 1), both - 1)
    return ones, both - ones


@functools.cache
def _tail(level: int) -> tuple[int, ...]:
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


@functools.cache
def _bits(other: int, one: int, tail: int) -> tuple[float, float, float, float]:
    """Of 0, of 1, of 2, and of one more."""
    ones, more = _halves(other, one)
    zero = 2 * (_HALF - ones - more)
    first = TAIL_PRECISION - math.log2(_tail(tail)[0])
    return (
        PRECISION - math.log2(zero),
        PRECISION - math.log2(ones),
        PRECISION - math.log2(more) + first,
        _event_bits(tail),
    )
