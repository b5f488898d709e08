"""Dependent quantisation: trellis-coded, with rate in the search and contexts in the code.

A scalar quantiser wastes up to 1.53 dB because its cells are cubes. Here two of them, the even and
the odd multiples of a step (both with zero), take turns, and which one comes next depends on the
indices before through a trellis of eight states: the points that sequences can reach lie far apart
in many dimensions (Fischer and Wang 1992, "Entropy-constrained trellis-coded quantization",
sec. III; Marcellin 1994, "On entropy-constrained trellis coded quantization", for the two
codebooks with zero in both). Viterbi's algorithm finds the indices of least

    |x - y|^2 + lambda * bits,   lambda proportional to step^2

and they are entropy-coded. Schwarz et al. 2019 ("Hybrid video coding with trellis-coded
quantization") drive the state by the parity of an index, as here; DeepCABAC and NNCodec
(ISO/IEC 15938-17; Wiedemann et al. 2020, Haase et al. 2020) do so for the weights of networks, and
are the closest prior art. We differ in the coder: rANS with static tables instead of adaptive
binary arithmetic coding, and contexts made for gradients of matrices, which are nearly outer
products (see `kernels/reference/trellis.py`). One step serves the whole vector, which shares bits
among its parts as reverse water-filling does; nothing is spent on where magnitudes differ.

Use it where bits are scarce and a core can be spared: at 0.1 to 3 bits per element it errs less
than every other codec here, most of all on real gradients, at some tens of millions of elements a
second. It is biased: put `ef(...)` around it. Above 4 bits or so, or if time is short, prefer
`qsgd(...) >> rans` or `eden`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.trellis import Tables, choose_tables, read_tables, to_bytes
from gradwire.compression.quantization._buckets import clamp_to
from gradwire.core.codec import Codec, Kind, Parts, State, expect, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Placed, Spec
from gradwire.kernels.reference.trellis import BLOCK, LARGEST, UNIT

_LAMBDA = 0.27  # squared steps per bit
_BLOCKS = 64  # of a long vector, on which tables are made
_PASSES, _SHORT = 2, 1 << 18  # searches of the whole, in vectors of so many elements at most
_ROUNDS, _MORE_ROUNDS = 3, 2  # of search and count until they fit; from a good start
_SEGMENT = 1 << 18  # elements coded by themselves, in long vectors
_MOST_SEGMENTS = 256
_SAMPLE = 1 << 18  # elements on which a step is looked for
_FINE = 4  # offsets travel in units of 4/64 of a step, as -8 .. 7
_NO_OFFSETS: tuple[int, ...] = (0,) * 6
_NOTHING, _CODED, _OFFSETS = 0, 1, 2  # the first byte: all zero, coded, coded with offsets
_TRIES, _MORE_TRIES = 20, 8  # of a search for the step: without and with a good guess
_SLACK = 0.01  # how far below the rate will do
_AROUND = 12  # bytes of a payload besides its parts: see core/payload.py


@dataclass(frozen=True, repr=False)
class DQ(Codec):
    """Trellis-coded quantisation with a rate-distortion search and an adaptive entropy code."""

    rate: float | None = None  # bits per element of the whole payload
    step: float | None = None  # in terms of the root mean square of the vector

    paper = "Fischer and Wang 1992, Entropy-constrained trellis-coded quantization"
    examples = ("dq(0.5)", "dq(2.0)", "dq(step=0.5)")

    leaves = Kind.NOTHING
    parts = ("code",)
    layered = True

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.step is None):
            raise ValueError("dq needs a rate or a step, one of them: dq(0.5) or dq(step=0.1)")
        if self.rate is not None and not 0 < self.rate <= 12:
            raise ValueError(f"dq: rate must lie in (0, 12] bits per element, got {self.rate}")
        if self.step is not None and not 2.0**-12 <= self.step <= 2.0**12:
            raise ValueError(f"dq: step must lie in 2^-12 .. 2^12, got {self.step}")

    def init(self, spec: Spec) -> State:
        return spec.layout

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        numbers = x.cpu().to(scale_dtype(x.dtype))
        shapes = _shapes(state, x.numel())
        code = self._encoded(numbers, shapes)
        return {"code": torch.frombuffer(code, dtype=torch.uint8).to(x.device)}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        packed = expect(parts["code"], "code", parts["code"].numel(), torch.uint8)
        shapes = _shapes(spec.tensors, spec.numel)
        decoded = _decoded(packed.cpu(), shapes, spec)
        return decoded.to(packed.device)

    def _encoded(self, x: Tensor, shapes: tuple[tuple[int, int], ...]) -> bytearray:
        rms = _root_mean_square(x)
        if not rms:
            return bytearray([_NOTHING])
        if self.step is not None:
            return _quantised(x, shapes, self.step * rms).code()
        assert self.rate is not None
        return _coded(x, shapes, rms, self.rate)


class _Quantised(NamedTuple):
    """A vector quantised with some step, and all that its code takes."""

    step: Tensor  # a scalar of the dtype that travels
    indices: Tensor
    contexts: Tensor
    tables: Tables
    offsets: tuple[int, ...]  # of |k| = 1, 2, more in either quantiser, in units of _FINE
    segments: int

    @property
    def num_bytes(self) -> int:
        """Of the code, to within a few."""
        tables = -(-int(self.tables.size_bits) // 8)
        return 1 + self.step.element_size() + 3 * any(self.offsets) + tables + 7 * self.segments - 3

    def code(self) -> bytearray:
        words, lengths = kernels.trellis_encode(
            self.indices,
            self.contexts,
            self.tables.halves(),
            self.tables.tails(),
            self.segments,
        )
        code = bytearray([_OFFSETS if any(self.offsets) else _CODED])
        code += self.step.reshape(1).numpy().tobytes()
        if any(self.offsets):
            nibbles = [offset & 15 for offset in self.offsets]
            code += bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2]))
        code += to_bytes(self.tables.bits)
        for length in lengths.tolist()[:-1]:
            code += length.to_bytes(4, "little")
        code += words.numpy().tobytes()
        return code


def _quantised(
    x: Tensor, shapes: tuple[tuple[int, int], ...], step: float, like: "_Quantised | None" = None
) -> _Quantised:
    """With this step; `like` is the same with another one, whose tables are a good start."""
    largest = float(x.abs().max())
    tiny = torch.finfo(x.dtype).tiny * 2.0**40
    least = largest / (2 * LARGEST - 64)
    wire = torch.tensor(max(step, least, tiny), dtype=x.dtype)
    most = UNIT * (2 * LARGEST - 16)
    scaled = (x * (UNIT / float(wire))).round_().clamp_(-most, most).to(torch.int32)
    layout = torch.tensor(shapes, dtype=torch.int64)
    segments = _num_segments(x.numel())
    contexts, counts, _ = kernels.trellis_contexts(scaled, None, layout, segments)
    # Tables and indices depend on each other. They settle on some blocks, in a few rounds.
    some, where = _blocks(scaled), _blocks(contexts)
    tables, offsets = choose_tables(counts), _NO_OFFSETS
    if like is not None:
        tables, offsets = like.tables, like.offsets
    for _ in range(_ROUNDS if like is None else _MORE_ROUNDS):
        tables, offsets = _settled(some, where, tables, offsets)
    for _ in range(_PASSES if x.numel() <= _SHORT else 1):
        indices = _searched(scaled, contexts, tables, offsets)
        contexts, counts, errors = kernels.trellis_contexts(scaled, indices, layout, segments)
        tables, offsets = choose_tables(counts), _offsets(errors)
    return _Quantised(wire, indices, contexts, tables, offsets, segments)


def _searched(scaled: Tensor, contexts: Tensor, tables: Tables, offsets: tuple[int, ...]) -> Tensor:
    rates = tables.rates(_LAMBDA * UNIT**2).clamp(max=1 << 17)
    moved = torch.tensor(offsets, dtype=torch.int32) * _FINE
    return kernels.trellis_search(scaled, contexts, rates, moved)


def _settled(
    scaled: Tensor, contexts: Tensor, tables: Tables, offsets: tuple[int, ...]
) -> tuple[Tables, tuple[int, ...]]:
    """The tables and offsets of the indices that these ones lead to."""
    indices = _searched(scaled, contexts, tables, offsets)
    counts, errors = kernels.trellis_counts(scaled, indices, contexts)
    return choose_tables(counts), _offsets(errors)


def _blocks(x: Tensor) -> Tensor:
    """Some of the blocks that are searched by themselves, if there are many."""
    stride = x.numel() // (_BLOCKS * BLOCK)
    return (
        x if stride < 2 else x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)[::stride].reshape(-1)
    )


def _offsets(errors: Tensor) -> tuple[int, ...]:
    """How far values move towards zero to be the means of what they stand for."""
    rows = errors.tolist()
    moved = [min(max(round(total / (_FINE * max(1, n))), -8), 7) for n, total in rows]
    # In squared steps, each gain is n times (2 total / n - move) move.
    gain = sum(
        move * _FINE * (2 * total - n * move * _FINE) for (n, total), move in zip(rows, moved)
    )
    pays = gain > 24 * _LAMBDA * UNIT**2
    return tuple(moved) if pays else _NO_OFFSETS


def _coded(x: Tensor, shapes: tuple[tuple[int, int], ...], rms: float, rate: float) -> bytearray:
    """The code with about the smallest step that keeps to a rate."""
    room = int(rate * x.numel() / 8) - _AROUND
    guess = math.log2(rms) + 1 - rate
    sample, its_shapes = _sampled(x, shapes)
    if sample.numel() == x.numel():
        return _search(x, shapes, guess, room, None, _TRIES).code
    its_room = int(room * sample.numel() / x.numel())
    found = _search(sample, its_shapes, guess, its_room, None, _TRIES)
    return _search(x, shapes, found.step, room, found.start, _MORE_TRIES).code


class _Found(NamedTuple):
    """What a search for the step has come to."""

    step: float  # its binary logarithm
    start: _Quantised | None  # with tables for other steps like it
    code: bytearray


def _search(
    x: Tensor,
    shapes: tuple[tuple[int, int], ...],
    at: float,
    room: int,
    start: _Quantised | None,
    tries: int,
) -> _Found:
    """From a first guess of the step to one whose code is no longer than `room`, and hardly less.

    If nearly all is zero, what is not costs so much that even more becomes zero: the size may jump.
    So where tables start from stays the same, once it is one of a few more bits than wanted.
    """
    best = _Found(at, start, bytearray([_NOTHING]))
    low: tuple[float, float] | None = None  # a step too small, log2 of its bytes
    high: tuple[float, float] | None = None
    target, slope = math.log2(max(room, 1) * (1 - _SLACK / 2)), 2.0
    largest = float(x.abs().max())
    for _ in range(tries):
        if 2.0**at > largest * UNIT:
            break  # nothing would be left
        tried = _quantised(x, shapes, 2.0**at, start)
        size = tried.num_bytes
        if abs(size - room) < 0.1 * room:  # an estimate is not enough
            code = tried.code()
            size = len(code)
            if len(best.code) < size <= room:
                best = _Found(at, start or tried, code)
            if room * (1 - _SLACK) <= size <= room or room - 2 <= size <= room:
                break
        point = at, math.log2(size)
        before = low if size > room else high
        if before and before[0] != at:
            slope = min(max((before[1] - point[1]) / (point[0] - before[0]), 0.3), 40.0)
        if size > room:
            low = point
            if start is None and size < 1.5 * room:
                start, high = tried, None
        else:
            high = point
        if low and high:
            share = (low[1] - target) / max(low[1] - high[1], 1e-9)
            share = min(max(share, 0.15), 0.85) if high[1] > target - 1 else 0.4
            at = low[0] + (high[0] - low[0]) * share
            if high[0] - low[0] < 1e-4:
                low = high = None  # from different starts
        elif low:
            at = low[0] + min(max((low[1] - target) / slope, 0.002), 1.0)
        elif high:
            at = high[0] - min(max((target - high[1]) / slope, 0.002), 2.0)
    if len(best.code) == 1 and high:
        tried = _quantised(x, shapes, 2.0 ** high[0], start)
        code = tried.code()
        if len(code) <= room:
            best = _Found(high[0], start or tried, code)
    return best


def _sampled(
    x: Tensor, shapes: tuple[tuple[int, int], ...]
) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Some rows of every matrix, if the vector is long."""
    stride = x.numel() // _SAMPLE
    if stride < 2:
        return x, shapes
    pieces, own, start = [], [], 0
    for rows, width in shapes:
        tensor = x[start : start + rows * width].view(rows, width)
        start += rows * width
        kept = tensor[::stride] if rows > 1 else tensor[:, : -(-width // stride)]
        pieces.append(kept.reshape(-1))
        own.append((kept.shape[0], kept.shape[1]))
    return torch.cat(pieces), tuple(own)


def _decoded(packed: Tensor, shapes: tuple[tuple[int, int], ...], spec: Spec) -> Tensor:
    if not packed.numel():
        raise WireError("code: no bytes")
    kind, dtype = int(packed[0]), scale_dtype(spec.dtype)
    if kind == _NOTHING and packed.numel() == 1:
        return torch.zeros(spec.numel, dtype=spec.dtype)
    front = 1 + dtype.itemsize + (3 if kind == _OFFSETS else 0)
    if kind not in (_CODED, _OFFSETS) or not spec.numel or packed.numel() < front:
        raise WireError(f"code: kind {kind} in {packed.numel()} bytes of {spec.numel} elements")
    step = packed[1 : 1 + dtype.itemsize].clone().view(dtype)
    if not bool((step > 0) & torch.isfinite(step)):
        raise WireError("code: a step that is not positive and finite")
    offsets = [0] * 6
    if kind == _OFFSETS:
        nibbles = [n for byte in packed[front - 3 : front].tolist() for n in (byte & 15, byte >> 4)]
        offsets = [_FINE * ((n ^ 8) - 8) for n in nibbles]
    tables, used = read_tables(packed[front:])
    front += used
    segments = _num_segments(spec.numel)
    streams = front + 4 * (segments - 1)
    if packed.numel() < streams or (packed.numel() - streams) % 2:
        raise WireError(f"code: {packed.numel()} bytes for {segments} segments")
    lengths = packed[front:streams].clone().view(torch.int32).to(torch.int64)
    last = (packed.numel() - streams) // 2 - int(lengths.sum())
    lengths = torch.cat([lengths, torch.tensor([last])])
    if int(lengths.min()) < 2:
        raise WireError(f"code: a segment of {int(lengths.min())} words")
    try:
        values = kernels.trellis_decode(
            packed[streams:],
            lengths,
            tables.halves(),
            tables.tails(),
            torch.tensor(offsets, dtype=torch.int32),
            torch.tensor(shapes, dtype=torch.int64),
            spec.numel,
        )
    except ValueError as error:
        raise WireError(str(error)) from None
    return clamp_to(values.to(dtype).mul_(step / UNIT), spec.dtype)


def _num_segments(numel: int) -> int:
    return min(max(1, numel // _SEGMENT), _MOST_SEGMENTS)


def _root_mean_square(x: Tensor) -> float:
    if not x.numel():
        return 0.0
    largest = float(x.abs().max())
    if not largest:
        return 0.0
    return largest * math.sqrt(float((x / largest).square().mean(dtype=torch.float64)))


def _shapes(tensors: Sequence[Placed] | None, numel: int) -> tuple[tuple[int, int], ...]:
    """The matrices in a vector; an inner stage of a chain knows none."""
    if tensors and tensors[-1][2] == numel and numel:
        return _matrices(tuple(tensors))
    return ((1, numel),)


@lru_cache(maxsize=1024)
def _matrices(tensors: tuple[Placed, ...]) -> tuple[tuple[int, int], ...]:
    shapes = []
    for _, start, stop, shape in tensors:
        numel = stop - start
        if numel:
            rows = shape[0] if len(shape) > 1 else 1
            shapes.append((1, numel) if numel in (rows, 0) else (rows, numel // rows))
    return tuple(shapes)
