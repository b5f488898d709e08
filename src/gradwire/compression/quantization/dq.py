"""Dependent quantisation: trellis-coded, with rate in the search and contexts in the code.

A scalar quantiser wastes up to 1.53 dB because its cells are cubes. Here two of them, the even and
the odd multiples of a step (both with zero), take turns, and which one comes next depends on the
indices before through a trellis of eight states: the points that sequences can reach lie far apart
in many dimensions (Fischer and Wang 1992, "Entropy-constrained trellis-coded quantization",
sec. III; Marcellin 1994, "On entropy-constrained trellis coded quantization", for the two
codebooks with zero in both). Viterbi's algorithm finds the indices of least

    |x - y|^2 + lambda * bits,   lambda proportional to step^2

and they are entropy-coded. Zero in both codebooks is best where most numbers are near it, as in
gradients; for a Gaussian of half a bit or more the second does without, as in Fischer and Wang's
code. A sample decides. Schwarz et al. 2019 ("Hybrid video coding with trellis-coded
quantization") drive the state by the parity of an index, as here; DeepCABAC and NNCodec
(ISO/IEC 15938-17; Wiedemann et al. 2020, Haase et al. 2020) do so for the weights of networks, and
are the closest prior art. We differ in the coder: rANS with static tables instead of adaptive
binary arithmetic coding, and contexts made for gradients of matrices, which are nearly outer
products (see `kernels/reference/trellis.py`). One step serves the whole vector, which shares bits
among its parts as reverse water-filling does; nothing is spent on where magnitudes differ.

Constants were chosen on the gradients in `experiment/gradients.py`. On five that were not used for
it (two perceptrons, a ResNet, an LSTM and a transformer of other sizes, seeds and steps) at 0.25 to
3 bits its error was 1.6 to over 60 times smaller than that of `topk >> fp16`, and from 1 bit on 8
times or more smaller than those of `qsgd >> rans` and `eden`, at their settings next to the rate.

A vector of few elements has no room for a trellis and its tables. Then each number travels by
itself in a few bits, or only the positions and signs of the largest, whatever errs least. A payload
may be 16 bytes longer than the rate says, as long as it has no more than 256, so that something is
always heard. Numbers that are all about as large (the survivors of `topk`) cost a bit each or none;
at less than that the part of the vector with the least energy goes without.

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
from gradwire.compression.quantization._short_codes import (
    PEAKS,
    PLAIN,
    from_peaks,
    from_plain,
    largest_magnitude,
    of_short_number,
    peaks,
    plain,
    short_number,
    two_bytes,
)
from gradwire.core.codec import Codec, Kind, Parts, State, clamp_to, expect, scale_dtype
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.spec import Placed, Spec
from gradwire.kernels.reference.trellis import BLOCK, CLASSES, LARGEST, UNIT

_LAMBDA = 0.27  # squared steps per bit
_BLOCKS = 64  # of a long vector, on which tables are made
_PASSES, _SHORT = 2, 1 << 18  # searches of the whole, in vectors of so many elements at most
_ROUNDS = 3  # of search and count until they fit
_SEGMENT = 1 << 18  # elements coded by themselves, in long vectors
_MOST_SEGMENTS = 256
_GRID = 14  # steps of all sizes, each half of the one before
_SAMPLE, _LARGER = 1 << 16, 1 << 18  # elements on which a step is looked for, and corrected
_PART = 64  # elements of a part of a row
_LEAST_SIGNED = 0.45  # bits per element from which on signs may count in the trellis
_FINE = 4  # offsets travel in units of 4/64 of a step, as -8 .. 7
_NO_OFFSETS: tuple[int, ...] = (0,) * 6
# The first byte: all zero, a sum of these, or one of a short code.
_NOTHING, _CODED, _OFFSETS, _SIGNED, _SHIFTED = 0, 1, 2, 4, 8
_TRIES, _SAMPLE_TRIES = 12, 8  # of a search for the step: on the whole, on a sample
_SLACK, _AIM = 0.02, -0.012  # how far below the rate will do, and what to try for, as log2
_AROUND = 9  # bytes of a payload besides its part and the length of it: see core/payload.py
_SPARE, _FEW = 16, 256  # bytes beyond the rate, if there are no more than so many with them
_SHORT_STEP = 1024  # elements up to which two bytes will do for a step
_LEAST_ROOM = 14  # bytes, of a trellis
_SMALLEST, _GREATEST = 2.0**-60, 2.0**100  # a vector beyond is scaled by a power of two
_MOST_EXPONENT = 1100


@dataclass(frozen=True, repr=False)
class DQ(Codec):
    """Trellis-coded quantisation with a rate-distortion search and an adaptive entropy code."""

    rate: float | None = None  # bits per element of the whole payload, see `_room`
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
        return {"tensors": spec.layout, "start": None}

    def kept_layout(self, state: State) -> tuple[Placed, ...]:
        return (state and state["tensors"]) or ()

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        numbers = x.cpu().to(scale_dtype(x.dtype))
        state = state or {"tensors": None, "start": None}
        shapes = _shapes(state["tensors"], x.numel())
        code, start = self._encoded(numbers, shapes, state["start"])
        packed = torch.frombuffer(code, dtype=torch.uint8).to(x.device)
        return {"code": packed}, {**state, "start": start}

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        packed = expect(parts["code"], "code", parts["code"].numel(), torch.uint8)
        shapes = _shapes(spec.tensors, spec.numel)
        decoded = _decoded(packed.cpu(), shapes, spec)
        return decoded.to(packed.device)

    def _encoded(
        self, x: Tensor, shapes: tuple[tuple[int, int], ...], last: State, spent: int = 0
    ) -> tuple[bytearray, State]:
        """The code, to which some bytes will be added, and what the next one may start from."""
        largest = largest_magnitude(x)
        if not largest:
            return bytearray([_NOTHING]), last
        if not _SMALLEST <= largest <= _GREATEST:
            exponent = math.frexp(largest)[1]
            code, start = self._encoded(_times_power(x, -exponent), shapes, last, 2)
            code[0] |= _SHIFTED
            return code + exponent.to_bytes(2, "little", signed=True), start
        rms = _root_mean_square(x)
        if self.step is not None:
            step = self.step * rms
            signed = _prefers_signs(*_sampled(x, shapes, _SAMPLE), step)
            return _quantised(x, shapes, step, None, _ROUNDS, None, signed).code(), None
        assert self.rate is not None
        start = None if last is None else _Start.of(last)
        code, start = _coded(x, shapes, rms, self.rate, spent, start)
        return code, None if start is None else start.state()


class _Quantised(NamedTuple):
    """A vector quantised with some step, and all that its code takes."""

    step: Tensor  # a scalar of the dtype that travels
    indices: Tensor
    contexts: Tensor
    tables: Tables
    offsets: tuple[int, ...]  # of |k| = 1, 2, more in either quantiser, in units of _FINE
    segments: int
    signed: bool

    @property
    def header(self) -> int:
        """Bytes that do not grow with the vector."""
        step = _step_bytes(self.indices.numel(), self.step.dtype)
        return 1 + step + 3 * any(self.offsets) + -(-len(self.tables.bits) // 8)

    @property
    def num_bytes(self) -> int:
        """Of the code, to within a few."""
        streams = (self.tables.size_bits - len(self.tables.bits)) / 8
        return self.header + math.ceil(streams) + 7 * self.segments - 3

    def _words(self) -> tuple[Tensor, Tensor]:
        halves, tails = self.tables.halves(), self.tables.tails()
        return kernels.trellis_encode(self.indices, self.contexts, halves, tails, self.segments)

    def code(self) -> bytearray:
        words, lengths = self._words()
        kind = _CODED + (_OFFSETS if any(self.offsets) else 0) + (_SIGNED if self.signed else 0)
        code = bytearray([kind])
        if _step_bytes(self.indices.numel(), self.step.dtype) == 2:
            code += short_number(float(self.step), self.step.dtype).to_bytes(2, "little")
        else:
            code += self.step.reshape(1).numpy().tobytes()
        if any(self.offsets):
            nibbles = [offset & 15 for offset in self.offsets]
            code += bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2]))
        code += to_bytes(self.tables.bits)
        for length in lengths.tolist()[:-1]:
            code += length.to_bytes(4, "little")
        code += words.numpy().tobytes()
        return code

    def error(self, x: Tensor) -> float:
        """The squared error, over the energy of x; that of some blocks of a long vector."""
        k, context, some = _blocks(self.indices), _blocks(self.contexts), _blocks(x)
        magnitude, q = k.abs(), context.to(torch.int32) & 1
        values = 2 * UNIT * magnitude - UNIT * q
        if any(self.offsets):
            offsets = torch.tensor(self.offsets, dtype=torch.int32) * _FINE
            values -= offsets[3 * q + magnitude.clamp(1, 3) - 1]
        values = torch.where(k < 0, -values, values) * (k != 0)
        largest = largest_magnitude(some) or float(self.step)
        error = (values.to(x.dtype) * (float(self.step) / UNIT) - some) / largest
        energy = float((some / largest).square().sum(dtype=torch.float64))
        return float(error.square().sum(dtype=torch.float64)) / (energy or 1.0)

    def rated(self, x: Tensor) -> tuple[float, float]:
        """Bits per element, and those that the squared error is worth: half its log2 more."""
        bits = 8 * self.num_bytes / x.numel()
        return bits, bits + 0.5 * math.log2(self.error(x) or 1e-30)


def _quantised(
    x: Tensor,
    shapes: tuple[tuple[int, int], ...],
    step: float,
    start: "_Start | None" = None,
    rounds: int = 0,
    passes: int | None = None,
    signed: bool = False,
) -> _Quantised:
    """With this step; the search takes the tables of `start`, or some that settle in `rounds`."""
    wire = torch.tensor(max(step, _least_step(x)), dtype=x.dtype)
    if _step_bytes(x.numel(), x.dtype) == 2:
        wire = of_short_number(short_number(float(wire), x.dtype), x.dtype)
    most = UNIT * (2 * LARGEST - 16)
    scaled = (x * (UNIT / float(wire))).round_().clamp_(-most, most).to(torch.int32)
    layout = torch.tensor(shapes, dtype=torch.int64)
    segments = _num_segments(x.numel())
    contexts, counts, _ = kernels.trellis_contexts(scaled, None, layout, segments)
    if start is not None:
        tables, offsets, signed = start.tables, start.offsets, start.signed
    else:
        # Tables and indices depend on each other. They settle on some blocks.
        some, where = _blocks(scaled), _blocks(contexts)
        if signed:  # then there is no zero in quantiser 1
            counts[1::2, 1] += counts[1::2, 0]
            counts[1::2, 0] = 0
        tables, offsets = choose_tables(counts), _NO_OFFSETS
        for _ in range(rounds):
            tables, offsets = _settled(some, where, tables, offsets, signed)
    coded, moved = tables, offsets
    for _ in range(passes or _passes(x)):
        if start is None:
            tables, offsets = coded, moved
        indices = _searched(scaled, contexts, tables, offsets, signed)
        contexts, counts, errors = kernels.trellis_contexts(
            scaled, indices, layout, segments, signed
        )
        coded, moved = choose_tables(counts), _offsets(errors)
    return _Quantised(wire, indices, contexts, coded, moved, segments, signed)


def _prefers_signs(x: Tensor, shapes: tuple[tuple[int, int], ...], step: float) -> bool:
    """Whether the trellis had better look at signs: see `kernels/reference/trellis.py`."""
    plain, signed = (_quantised(x, shapes, step, None, 2, 1, signs) for signs in (False, True))
    bits, worth = signed.rated(x)
    return bits >= _LEAST_SIGNED and worth < plain.rated(x)[1] - 0.01


def _passes(x: Tensor) -> int:
    return _PASSES if x.numel() <= _SHORT else 1


def _least_step(x: Tensor) -> float:
    """The smallest that leaves indices in their range."""
    # A step of two bytes may be smaller than asked for by 1/64.
    return 1.02 * largest_magnitude(x) / (2 * LARGEST - 64) or torch.finfo(x.dtype).tiny


def _searched(
    scaled: Tensor, contexts: Tensor, tables: Tables, offsets: tuple[int, ...], signed: bool
) -> Tensor:
    rates = tables.rates(_LAMBDA * UNIT**2).clamp(max=1 << 17)
    if signed:
        rates[4] = 1 << 17  # no zero in quantiser 1: it would spoil what signs are good for
    moved = torch.tensor(offsets, dtype=torch.int32) * _FINE
    return kernels.trellis_search(scaled, contexts, rates, moved, signed)


def _settled(
    scaled: Tensor, contexts: Tensor, tables: Tables, offsets: tuple[int, ...], signed: bool
) -> tuple[Tables, tuple[int, ...]]:
    """The tables and offsets of the indices that these ones lead to."""
    indices = _searched(scaled, contexts, tables, offsets, signed)
    counts, errors = kernels.trellis_counts(scaled, indices, contexts, signed)
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


class _Hint(NamedTuple):
    """Where all steps were tried, the best."""

    error: float
    step: float  # log2, in terms of the root mean square
    signed: bool


class _Start(NamedTuple):
    """Where a search for the step begins: at that of the last vector, or of a sample."""

    step: float  # log2, in terms of the root mean square
    slope: float  # by how many times faster the size falls than the step grows, as logarithms
    tables: Tables
    offsets: tuple[int, ...]
    signed: bool
    hint: _Hint | None = None

    @staticmethod
    def of(state: State) -> "_Start":
        tables = Tables(state["levels"], "", 0.0)
        own = (state["step"], state["slope"], tables, state["offsets"], state["signed"])
        return _Start(*own, _Hint(*state["hint"]) if state["hint"] else None)

    def state(self) -> State:
        return {
            "step": self.step,
            "slope": self.slope,
            "levels": self.tables.levels,
            "offsets": self.offsets,
            "signed": self.signed,
            "hint": None if self.hint is None else tuple(self.hint),
        }


def _start_anew() -> _Start:
    tables = choose_tables(torch.zeros(2 * CLASSES, 4, dtype=torch.int64))
    return _Start(0.0, 1.0, tables, _NO_OFFSETS, False)


def _coded(
    x: Tensor,
    shapes: tuple[tuple[int, int], ...],
    rms: float,
    rate: float,
    spent: int,
    start: _Start | None,
) -> tuple[bytearray, _Start | None]:
    """The code with about the smallest step that keeps to a rate, and a start for the next one.

    Tables and indices depend on each other, and where nearly all is zero what is not costs so much
    that even more becomes zero: sizes jump. So tables settle while the step follows the rate, on a
    sample; then they stay, and the size changes smoothly with the step. If that comes to less than
    any source allows, or to nothing, all steps are tried, and the least error is taken.
    """
    room = max(_room(rate, x.numel()) - spent, _room(0.0, 1))
    hint = None if start is None else start.hint
    if start is not None and hint is not None:
        code, found = _tried_all(x, shapes, rms, room, hint)
        if found.error <= 1.1 * hint.error + 1e-9:
            return code, start._replace(hint=found._replace(error=hint.error))
    error, code, start = _followed(x, shapes, rms, rate, room, start)
    bound = 4.0 ** -(8 * max(room - 24, 0) / x.numel())  # of a Gaussian; all others are easier
    most = min((1.3 if rate < 4 else 1.6) * bound, 0.5 + 0.5 * bound)
    near = error <= most and len(code) >= 0.9 * room
    if room >= _FEW and (near or error <= 1e-4 * bound):
        return code, start
    other, found = _tried_all(x, shapes, rms, room, None)
    if found.error < error:
        code, start = other, (start or _start_anew())._replace(hint=found)
    return code, start


def _followed(
    x: Tensor,
    shapes: tuple[tuple[int, int], ...],
    rms: float,
    rate: float,
    room: int,
    start: _Start | None,
) -> tuple[float, bytearray, _Start | None]:
    """The code of least error found by following the size, with that error: 1 if all is zero."""
    if room < _LEAST_ROOM:
        return 1.0, bytearray([_NOTHING]), None
    guess = math.log2(rms)
    tried: _Quantised | None = None
    if start is not None:
        tried = _quantised(x, shapes, 2.0 ** (guess + start.step), start)
        if not 0.7 <= tried.num_bytes / max(room, 1) <= 1.4:
            start = tried = None
    if start is None:
        start = _settled_start(x, shapes, guess, rate, room, guess + 1 - rate, False)
        sample = _sampled(x, shapes, _SAMPLE)
        if start and rate >= _LEAST_SIGNED and _prefers_signs(*sample, 2.0 ** (guess + start.step)):
            at = guess + start.step
            start = _settled_start(x, shapes, guess, rate, room, at, True) or start
    if start is None:
        return 1.0, bytearray([_NOTHING]), None
    at, slope = guess + start.step, start.slope
    lowest, highest = _least_step(x), largest_magnitude(x) * UNIT
    low: _Point | None = None  # a step too small
    high: _Point | None = None
    best, code, least = start, bytearray([_NOTHING]), 1.0
    for _ in range(_TRIES):
        tried = tried or _quantised(x, shapes, 2.0**at, start)
        size = tried.num_bytes
        if size < 1.005 * room:  # an estimate is not enough
            own = tried.code()
            size = len(own)
            error = tried.error(x) if size <= room else math.inf
            if error < least:
                # A single pass starts from rougher contexts than those that its code is in.
                kept = tried if _passes(x) > 1 else start
                best = _Start(at - guess, slope, kept.tables, kept.offsets, tried.signed)
                least, code = error, own
            if room * (1 - _SLACK) <= size <= room or room - 2 <= size <= room:
                break
        point, tried = (at, math.log2(size / max(room, 1))), None
        before = low if size > room else high
        if size > room:
            low = point
        else:
            high = point
        if low and high:
            slope = _slope(low, high)
            share = (low[1] - _AIM) / (low[1] - high[1])
            at = low[0] + (high[0] - low[0]) * min(max(share, 0.1), 0.9)
            if high[0] - low[0] < 1e-5:
                break
        else:
            if before:
                slope = _slope(before, point)
            at += min(max((point[1] - _AIM) / slope, -2.0), 2.0)
        if not lowest <= 2.0**at <= highest:
            break
    return least, code, best


def _tried_all(
    x: Tensor, shapes: tuple[tuple[int, int], ...], rms: float, room: int, hint: "_Hint | None"
) -> tuple[bytearray, "_Hint"]:
    """The code of least error of all kinds and steps, or of those near a hint, and where it was."""
    found = [peaks(x, room), plain(x, room)]
    errors = [(error, _Hint(error, 0.0, False)) for error, _ in found]
    if room >= _LEAST_ROOM:
        error, code, at, signed = _best_step(x, shapes, rms, room, hint)
        found.append((error, code))
        errors.append((error, _Hint(error, at - math.log2(rms), signed)))
    best = min(range(len(found)), key=lambda i: found[i][0])
    return found[best][1], errors[-1][1]._replace(error=found[best][0])


def _best_step(
    x: Tensor, shapes: tuple[tuple[int, int], ...], rms: float, room: int, hint: "_Hint | None"
) -> tuple[float, bytearray, float, bool]:
    """The least error of all steps, where a part of the vector may go without bits.

    Sizes jump where all numbers are about as large: they take one bit each or none. Between the two
    the part of least energy becomes zero. With feedback it is another part next time.
    """
    sample, own = _sampled(x, shapes, _SAMPLE)
    found: list[tuple[float, float, bool, float]] = []

    def look(at: float, signed: bool) -> float:
        tried = _quantised(sample, own, 2.0**at, None, 2, None, signed)
        excess = _excess(tried, x, sample, room)
        spared = max(0.0, 1 - 2.0**-excess)
        found.append((tried.error(sample) * (1 - spared) + spared, at, signed, spared))
        return excess

    if hint is None:
        for signed in (False, True):
            at = math.log2(largest_magnitude(x)) + 1
            for _ in range(_GRID):
                if 2.0**at < _least_step(x) or look(at, signed) > 2:
                    break
                at -= 1
    else:
        look(math.log2(rms) + hint.step, hint.signed)
    for width in (0.5, 0.25) if hint is None else (0.2,):
        _, at, signed, _ = min(found)
        look(at - width, signed)
        look(at + width, signed)
    least, code = 1.0, bytearray([_NOTHING])
    _, at, signed, spared = min(found)
    low, high = -1.0, 1.0  # shares that are too small, and that will do
    for _ in range(_TRIES):
        tried = _quantised(_without(x, spared), shapes, 2.0**at, None, _ROUNDS, None, signed)
        fresh = tried.code()
        error = tried.error(x) if len(fresh) <= room else math.inf
        if error < least:
            least, code = error, fresh
        share = len(fresh) / room
        if len(fresh) > room:
            low = spared
        elif spared == 0.0 or share > 1 - _SLACK:
            break
        else:
            high = spared
        spared = max(0.0, 1 - (1 - spared) / share * (1 - _SLACK / 3))
        if not low < spared < high:
            spared = max(0.0, low + high) / 2
        if (high - low) * x.numel() < 1:
            break
    return least, code, at, signed


def _without(x: Tensor, share: float) -> Tensor:
    """The vector without a run of this share of its length, that of the least energy."""
    run = min(math.ceil(share * x.numel()), x.numel())
    if not run:
        return x
    sums = torch.zeros(x.numel() + 1, dtype=torch.float64)
    torch.cumsum((x.double() / largest_magnitude(x)).square(), 0, out=sums[1:])
    first = int((sums[run:] - sums[: sums.numel() - run]).argmin())
    kept = x.clone()
    kept[first : first + run] = 0
    return kept


def _room(rate: float, numel: int) -> int:
    """Bytes of a code: what the rate gives, less what goes around it.

    A payload may have 16 bytes more (18 if a power of two travels too), but no more than 256 with
    them: a vector of few elements would have no bits left otherwise, and never be heard of.
    """
    own = rate * numel / 8
    total = int(max(own, min(own + _SPARE, _FEW)))
    length = 1
    while total - _AROUND - length >= 1 << 7 * length:
        length += 1
    return total - _AROUND - length


def _step_bytes(numel: int, dtype: torch.dtype) -> int:
    return 2 if numel <= _SHORT_STEP else dtype.itemsize


def _times_power(x: Tensor, exponent: int) -> Tensor:
    """x times 2^exponent, where that may be beyond the range by itself."""
    half = exponent // 2
    return x * 2.0**half * 2.0 ** (exponent - half)


_Point = tuple[float, float]  # log2 of a step, log2 of its bytes over what there is room for


def _settled_start(
    x: Tensor,
    shapes: tuple[tuple[int, int], ...],
    rms: float,
    rate: float,
    room: int,
    at: float,
    signed: bool,
) -> _Start | None:
    """A step for the rate and tables that go with it, from samples; None if there is no room."""
    slope = min(max(1.44 / rate, 0.4), 6.0)
    least_slope = min(1.0 / rate, 1.0)
    lowest, highest = math.log2(_least_step(x)), math.log2(largest_magnitude(x) * UNIT)
    start: _Start | None = None
    found: _Start | None = None
    before: _Point | None = None
    sample, own = _sampled(x, shapes, _SAMPLE)
    for i in range(_SAMPLE_TRIES):
        at = min(max(at, lowest), highest)
        tried = _quantised(sample, own, 2.0**at, start, 1, _passes(x), signed)
        point = at, _excess(tried, x, sample, room)
        is_near = abs(point[1] - _AIM) < 1
        if before and abs(before[0] - at) > 0.01:
            slope = max(_slope(before, point), least_slope)
        before = point
        move = min(max((point[1] - _AIM) / slope, -2.0), 2.0)
        start = _Start(at + move - rms, slope, tried.tables, tried.offsets, signed)
        if is_near or found is None or move < 0:
            found = start
        if (abs(point[1] - _AIM) < 0.03 and i >= 2) or (at in (lowest, highest) and i):
            break
        if not is_near:
            start = None
        at += move
    if found is not None and x.numel() >= 4 * _LARGER:
        sample, own = _sampled(x, shapes, _LARGER)
        at = rms + found.step
        point = at, _excess(_quantised(sample, own, 2.0**at, found), x, sample, room)
        if abs(point[1] - _AIM) < 1:
            found = found._replace(step=found.step + (point[1] - _AIM) / slope)
    return found


def _excess(tried: _Quantised, x: Tensor, sample: Tensor, room: int) -> float:
    """By how much x would be too long, as log2, if it were all like the sample."""
    share = x.numel() / sample.numel()
    size = tried.header + share * (tried.num_bytes - tried.header)
    return math.log2(size / max(room, 1))


def _slope(a: _Point, b: _Point) -> float:
    return min(max((a[1] - b[1]) / ((b[0] - a[0]) or 1e-9), 0.2), 40.0)


def _sampled(
    x: Tensor, shapes: tuple[tuple[int, int], ...], numel: int
) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """Some rows of every matrix, and if there are few, parts of them, if the vector is long."""
    stride = x.numel() // numel
    if stride < 2:
        return x, shapes
    pieces, own, start = [], [], 0
    for rows, width in shapes:
        tensor = x[start : start + rows * width].view(rows, width)
        start += rows * width
        leap = min(stride, max(1, rows // 8))
        kept, few = tensor[::leap], stride // leap
        if few > 1 and width >= 2 * _PART:
            whole = kept[:, : width // _PART * _PART].unflatten(1, (-1, _PART))
            kept = whole[:, ::few].flatten(1)
        pieces.append(kept.reshape(-1))
        own.append((kept.shape[0], kept.shape[1]))
    return torch.cat(pieces), tuple(own)


def _decoded(packed: Tensor, shapes: tuple[tuple[int, int], ...], spec: Spec) -> Tensor:
    if not packed.numel():
        raise WireError("code: no bytes")
    kind, dtype = int(packed[0]), scale_dtype(spec.dtype)
    if kind == _NOTHING and packed.numel() == 1:
        return torch.zeros(spec.numel, dtype=spec.dtype)
    if kind & _SHIFTED:
        if packed.numel() < 4 or kind == _SHIFTED:
            raise WireError(f"code: kind {kind} in {packed.numel()} bytes")
        exponent = two_bytes(packed[-2:], signed=True)
        if not -_MOST_EXPONENT <= exponent <= _MOST_EXPONENT:
            raise WireError(f"code: a power of two of {exponent}")
        inner = packed[:-2].clone()
        inner[0] = kind - _SHIFTED
        small = _decoded(inner, shapes, Spec((spec.numel,), dtype))
        return clamp_to(_times_power(small, exponent), spec.dtype)
    if kind == PEAKS and spec.numel:
        return clamp_to(from_peaks(packed, spec.numel, dtype), spec.dtype)
    if kind == PLAIN and spec.numel:
        return clamp_to(from_plain(packed, spec.numel, dtype), spec.dtype)
    size = _step_bytes(spec.numel, dtype)
    front = 1 + size + (3 if kind & _OFFSETS else 0)
    known = _CODED + (kind & _OFFSETS) + (kind & _SIGNED)
    if kind != known or not spec.numel or packed.numel() < front:
        raise WireError(f"code: kind {kind} in {packed.numel()} bytes of {spec.numel} elements")
    if size == 2:
        step = of_short_number(two_bytes(packed[1:3]), dtype)
    else:
        step = packed[1 : 1 + size].clone().view(dtype)
    if not bool((step > 0) & torch.isfinite(step)):
        raise WireError("code: a step that is not positive and finite")
    offsets = [0] * 6
    if kind & _OFFSETS:
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
            bool(kind & _SIGNED),
        )
    except ValueError as error:
        raise WireError(str(error)) from None
    return clamp_to(values.to(dtype).mul_(step / UNIT), spec.dtype)


def _num_segments(numel: int) -> int:
    return min(max(1, numel // _SEGMENT), _MOST_SEGMENTS)


def _root_mean_square(x: Tensor) -> float:
    """The same whatever the number of threads: sums are of rows of one length."""
    largest = largest_magnitude(x)
    if not largest:
        return 0.0
    if not 1e-12 < largest < 1e12:
        x = x / largest
    rows, rest = x[: x.numel() // 1024 * 1024].view(-1, 1024), x[x.numel() // 1024 * 1024 :]
    norms = [torch.linalg.vector_norm(part, dim=-1).double() for part in (rows, rest)]
    mean = sum(float(norm.square().sum()) for norm in norms) / x.numel()
    return math.sqrt(mean) * (1 if 1e-12 < largest < 1e12 else largest)


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
