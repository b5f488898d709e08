"""Quantises a vector with a given step for `dq`: the indices, and the tables that code them.

Tables and indices depend on each other: the search takes the rates of tables, and tables are made
of the indices that it finds. They converge on some blocks of the vector, in a few rounds.
"""

import math
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.trellis import Tables
from gradwire.compression.quantization._powers import largest_magnitude
from gradwire.compression.source_coding._dq_plane import plane_fit
from gradwire.compression.source_coding._dq_short_codes import from_short_float, to_short_float
from gradwire.compression.source_coding._dq_wire import (
    NO_OFFSETS,
    Shapes,
    num_segments,
    step_bytes,
    write_header,
)
from gradwire.core.codec import State
from gradwire.kernels.reference.trellis import BLOCK, CLASSES, LARGEST, UNIT

SAMPLE_NUMEL = 1 << 16  # size of the sample on which a step is searched
MIN_SIGNED_BITS = 0.45  # per element; from this rate on the trellis may use signs
MIN_PLANE_BITS, MIN_PLANE_NUMEL = 0.7, 1 << 11  # from this rate and length on, planes may be used
NUM_ROUNDS = 3  # of search and count until indices and tables fit
_NUM_TABLE_BLOCKS = 64  # blocks of a long vector that tables are made from
_SHORT_PASSES, _SHORT_NUMEL = 2, 1 << 18  # searches of a vector of at most this length
_ROW_PART_NUMEL = 64  # elements of a part of a row
PLANE_STEP_FACTOR = 1.25  # step of a plane / step of a trellis of equal error
_PLANE_MARGIN = 0.997  # a plane must cost less than this share of a trellis
_EQUAL_ERROR_FACTOR = 1.02  # errors that differ by less count as equal
_MAX_STEP_TRIES = 4  # steps tried until errors are equal
_SLOPE = 0.32  # of error over rate, in squared steps of a trellis


class Way(IntEnum):
    """How the quantiser of each element is selected, and where zero is a value of quantiser 1."""

    PLAIN = 0  # the trellis; everywhere
    SIGNED = 1  # the trellis with signs; nowhere
    PLANE_ALL = 2  # a plane; everywhere
    PLANE_SMALL = 3  # a plane; among small numbers
    PLANE_NONE = 4  # a plane; nowhere

    @property
    def is_plane(self) -> bool:
        return self >= Way.PLANE_ALL


FIRST_CLASS_WITHOUT_ZERO = {
    Way.PLANE_ALL: CLASSES,
    Way.PLANE_SMALL: 7,
    Way.PLANE_NONE: 0,
}  # classes without zero


class Prior(NamedTuple):
    """The rates and values of indices that a search starts with."""

    levels: Tensor  # of tables
    offsets: Tensor  # of |k| = 1, 2, more in either quantiser, in 1/64 of a step
    way: Way

    @staticmethod
    def of(state: State) -> "Prior":
        levels = torch.tensor(state["levels"], dtype=torch.int8, device="cpu")
        offsets = torch.tensor(state["offsets"], dtype=torch.int32, device="cpu")
        return Prior(levels, offsets, Way(state["way"]))

    def state(self) -> dict[str, State]:
        return {
            "levels": self.levels.tolist(),
            "offsets": self.offsets.tolist(),
            "way": int(self.way),
        }


class Quantised(NamedTuple):
    """A vector quantised with a step, and the parts of its code."""

    step: Tensor  # a scalar of the dtype that travels
    indices: Tensor
    contexts: Tensor
    tables: Tables
    offsets: Tensor
    segments: int
    way: Way
    error: float  # squared, over the energy; that of some blocks of a long vector
    plane: Tensor | None  # that travels

    @property
    def prior(self) -> Prior:
        return Prior(self.tables.levels, self.offsets, self.way)

    @property
    def header(self) -> int:
        """Bytes that do not grow with the vector."""
        step = step_bytes(self.indices.numel(), self.step.dtype)
        return 1 + step + 3 * bool(self.offsets.any()) + -(-len(self.tables.bits) // 8)

    @property
    def num_bytes(self) -> int:
        """Of the code, to within a few."""
        streams = (self.tables.size_bits - len(self.tables.bits)) / 8
        plane = 0 if self.plane is None else self.plane.numel()
        return self.header + plane + math.ceil(streams) + 7 * self.segments - 3

    def code(self) -> bytearray:
        signed = self.way is Way.SIGNED
        front = write_header(
            self.step, self.indices.numel(), self.tables, self.offsets, signed, self.plane
        )
        halves, tails = self.tables.halves(), self.tables.tails()
        words, lengths = kernels.trellis_encode(
            self.indices, self.contexts, halves, tails, self.segments
        )
        for length in lengths.tolist()[:-1]:
            front += length.to_bytes(4, "little")
        return front + words.numpy().tobytes()

    def rated(self) -> tuple[float, float]:
        """Bits per element, and those that the squared error is worth: half its log2 more."""
        bits = 8 * self.num_bytes / self.indices.numel()
        return bits, bits + 0.5 * math.log2(self.error or 1e-30)


def quantise(
    x: Tensor,
    shapes: Shapes,
    step: float,
    prior: Prior | None = None,
    rounds: int = 0,
    passes: int | None = None,
    way: Way = Way.PLAIN,
    lowest: float | None = None,
) -> Quantised:
    """Quantises with this step; the search uses a prior, or tables that converge in `rounds`.

    `lowest` is the smallest step of x, if it is known: else that takes a pass over x.
    """
    lowest = smallest_step(x) if lowest is None else lowest
    wire = torch.tensor(max(step, lowest), dtype=x.dtype, device="cpu")
    if step_bytes(x.numel(), x.dtype) == 2:
        wire = from_short_float(to_short_float(float(wire), x.dtype), x.dtype)
    scaled = kernels.trellis_scale(x, UNIT / float(wire), UNIT * (2 * LARGEST - 16))
    segments = num_segments(x.numel())
    levels, offsets, way = prior or (None, NO_OFFSETS, way)
    start = scaled, layout_of(shapes), segments, levels, offsets
    passes, stride = passes or num_passes(x), max(1, x.numel() // (_NUM_TABLE_BLOCKS * BLOCK))
    plane = None
    if way.is_plane:
        fit, plane = plane_fit(
            *start, FIRST_CLASS_WITHOUT_ZERO[way], passes + (0 if prior else rounds), stride
        )
    else:
        fit = kernels.trellis_fit(*start, way is Way.SIGNED, rounds, passes, stride)
    indices, contexts, coded, offsets, text, size, error, energy = fit
    tables = Tables(coded, text, size)
    share = error / energy if energy else 1.0
    return Quantised(wire, indices, contexts, tables, offsets, segments, way, share, plane)


@lru_cache(maxsize=1024)
def layout_of(shapes: Shapes) -> Tensor:
    return torch.tensor(shapes, dtype=torch.int64, device="cpu")


def prefers_signs(x: Tensor, shapes: Shapes, step: float) -> bool:
    """Whether the trellis should use signs: see `kernels/reference/trellis.py`."""
    lowest = smallest_step(x)
    plain, signed = (
        quantise(x, shapes, step, None, 2, 1, way, lowest) for way in (Way.PLAIN, Way.SIGNED)
    )
    bits, worth = signed.rated()
    return bits >= MIN_SIGNED_BITS and worth < plain.rated()[1] - 0.01


def preferred_plane(x: Tensor, shapes: Shapes, step: float, way: Way) -> Way | None:
    """The best plane, if it beats the trellis with this step.

    Error and bits are compared, weighted as in the search itself.
    """
    energy, lowest = float(x.double().square().mean()), smallest_step(x)

    def cost(tried: Quantised) -> float:
        return tried.error * energy + _SLOPE * step**2 * tried.rated()[0]

    most = cost(quantise(x, shapes, step, None, 2, 1, way, lowest))
    planes = (own for own in Way if own.is_plane)
    found = {
        own: cost(quantise(x, shapes, PLANE_STEP_FACTOR * step, None, 2, 2, own, lowest))
        for own in planes
    }
    best = min(found, key=lambda own: found[own])
    return best if found[best] < _PLANE_MARGIN * most else None


def quantise_at_step(
    x: Tensor, shapes: Shapes, step: float, way: Way, passes: int | None = None
) -> Quantised:
    """Quantises with this step and tables that converge for it."""
    return quantise(x, shapes, step, None, 1 if way.is_plane else NUM_ROUNDS, passes, way)


def quantise_plane_at_step(
    x: Tensor, shapes: Shapes, step: float, way: Way, passes: int
) -> tuple[Way, float] | None:
    """The plane that takes fewer bits than the trellis at the same error, if there is one.

    Also the factor of the step at which the errors are equal.
    """
    trellis = quantise_at_step(x, shapes, step, way, passes)
    bits = trellis.rated()[0]
    plane = preferred_plane(x, shapes, step, way) if bits >= MIN_PLANE_BITS else None
    if plane is None:
        return None
    factor = PLANE_STEP_FACTOR
    for _ in range(_MAX_STEP_TRIES):
        tried = quantise_at_step(x, shapes, factor * step, plane, passes)
        ratio = tried.error / trellis.error if trellis.error else math.inf
        if 1 / _EQUAL_ERROR_FACTOR <= ratio <= _EQUAL_ERROR_FACTOR:
            own = tried.rated()[0] + 0.5 * math.log2(ratio)  # remaining relative difference
            return (plane, factor) if own < _PLANE_MARGIN * bits else None
        factor /= min(max(math.sqrt(ratio), 0.8), 1.25)
    return None


def num_passes(x: Tensor) -> int:
    return _SHORT_PASSES if x.numel() <= _SHORT_NUMEL else 1


def smallest_step(x: Tensor, largest: float | None = None) -> float:
    """The smallest step that keeps indices in their range; `largest` as in `in_range`."""
    if largest is None:
        largest = largest_magnitude(x)
    # A step of two bytes may be smaller than asked for by 1/64.
    return 1.02 * largest / (2 * LARGEST - 64) or torch.finfo(x.dtype).tiny


def take_sample(x: Tensor, shapes: Shapes, numel: int) -> tuple[Tensor, Shapes]:
    """A sample of a long vector: some rows of every matrix, or parts of rows if there are few."""
    stride = x.numel() // numel
    if stride < 2:
        return x, shapes
    pieces, own, start = [], [], 0
    for rows, width in shapes:
        tensor = x[start : start + rows * width].view(rows, width)
        start += rows * width
        leap = min(stride, max(1, rows // 8))
        kept, few = tensor[::leap], stride // leap
        if few > 1 and width >= 2 * _ROW_PART_NUMEL:
            whole = kept[:, : width // _ROW_PART_NUMEL * _ROW_PART_NUMEL].unflatten(
                1, (-1, _ROW_PART_NUMEL)
            )
            kept = whole[:, ::few].flatten(1)
        pieces.append(kept.reshape(-1))
        own.append((kept.shape[0], kept.shape[1]))
    return torch.cat(pieces), tuple(own)
