"""Probabilities of the indices of a trellis-coded quantiser: tables of a few bytes.

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
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.kernels.reference.trellis import CLASSES
from gradwire.kernels.reference.trellis_tables import (
    LEVEL,
    SHARED,
    Levels,
    expected_levels,
    halves,
    spread,
    tail,
)


class Tables(NamedTuple):
    """Three levels for each context, and how they are written."""

    levels: Tensor  # int8 [2 CLASSES, 3]
    bits: str
    size_bits: float  # of the indices that were counted, together with the tables

    def halves(self) -> Tensor:
        """int32 [2 CLASSES, 2]: the frequencies of +1 and of +more."""
        numbers = self.levels.long() + LEVEL
        return _all_halves()[numbers[:, 0], numbers[:, 1]]

    def tails(self) -> Tensor:
        """int32 [2 CLASSES, TOKENS]."""
        return _all_tails()[self.levels[:, 2].long() + LEVEL]


def read_tables(packed: Tensor) -> tuple[Tables, int]:
    """The tables at the front of bytes, and how many bytes they take."""
    # No more than 96 numbers of at most 15 bits.
    text = "".join(f"{byte:08b}" for byte in packed[:256].tolist())
    stream = iter(text)
    shared, first, last = _number(stream, 2), 0, 0
    if shared >= len(SHARED):
        raise WireError(f"tables of grouping {shared}")
    width, used = SHARED[shared], 2
    if width < CLASSES:
        first, last, used = _number(stream, 4), _number(stream, 4), 10
    if not first <= last < CLASSES // width:
        raise WireError(f"tables of classes {first} .. {last}, grouping {shared}")
    levels: dict[tuple[int, int], Levels] = {}
    for g in range(first, last + 1):
        for q in (0, 1):
            own = []
            for guess in expected_levels(levels.get((g - 1, q)), g, width):
                difference, length = _golomb_read(stream)
                used += length
                own.append(guess + difference)
                if abs(own[-1]) > LEVEL:
                    raise WireError(f"a table with odds of {own[-1]} / 3 bits")
            levels[g, q] = (own[0], own[1], own[2])
    size = -(-used // 8)
    if "1" in text[used : 8 * size]:
        raise WireError("tables: padding that is not zero")
    found = torch.tensor(spread(levels, first, last, width), dtype=torch.int8, device="cpu")
    return Tables(found, text[:used], 0.0), size


def to_bytes(bits: str) -> bytes:
    """A text of 0 and 1, padded with zeros."""
    padded = bits + "0" * (-len(bits) % 8)
    return int(padded, 2).to_bytes(len(padded) // 8, "big") if padded else b""


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
def _all_halves() -> Tensor:
    every = range(-LEVEL, LEVEL + 1)
    table = [[halves(a, b) for b in every] for a in every]
    return torch.tensor(table, dtype=torch.int32, device="cpu")


@functools.cache
def _all_tails() -> Tensor:
    table = [tail(level) for level in range(-LEVEL, LEVEL + 1)]
    return torch.tensor(table, dtype=torch.int32, device="cpu")
