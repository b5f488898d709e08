"""Searches the step with which `dq` keeps to a rate.

Vectors change little between calls, so a search begins at the result of the last one; the first one
begins with a sample, which also decides between trellis and plane. That decision is made again, as
in a first call, when the vectors have changed too much (`Choice`), and periodically. For short
vectors the size is not a smooth function of the step; then all steps are tried.
"""

import math

import torch
from torch import Tensor

from gradwire.compression.quantization._powers import largest_magnitude
from gradwire.compression.source_coding._dq_quantised import (
    MIN_PLANE_BITS,
    MIN_PLANE_NUMEL,
    MIN_SIGNED_BITS,
    NUM_ROUNDS,
    PLANE_STEP_FACTOR,
    SAMPLE_NUMEL,
    Prior,
    Quantised,
    Way,
    num_passes,
    preferred_plane,
    prefers_signs,
    quantise,
    smallest_step,
    take_sample,
)
from gradwire.compression.source_coding._dq_short_codes import encode_peaks, encode_plain
from gradwire.compression.source_coding._dq_start import (
    Choice,
    Hint,
    Start,
    make_fresh_start,
    tail_shape,
)
from gradwire.compression.source_coding._dq_wire import NOTHING, Shapes
from gradwire.kernels.reference.trellis import UNIT

_NUM_GRID_STEPS = 14  # step sizes tried, each half of the one before
_CORRECTION_NUMEL = 1 << 18  # elements on which a step is corrected
_MAX_TRIES, _MAX_SAMPLE_TRIES = 12, 8  # of a search for the step: on the whole vector, on a sample
_LOG2_SLACK, _LOG2_AIM = 0.02, -0.012  # accepted shortfall below the rate, and target
_ENVELOPE_BYTES = 9  # of a payload, besides its part and that part's length: see core/payload.py
_SPARE_BYTES, _MAX_SPARED_BYTES = 16, 256  # allowed beyond the rate, up to this total
_MIN_TRELLIS_BYTES = 14  # smallest code of a trellis
_MAX_HINT_CALLS, _MAX_HINT_ERROR_GROWTH = 32, 1.5  # beyond these all steps are tried again


def encode_at_rate(
    x: Tensor,
    shapes: Shapes,
    rms: float,
    rate: float,
    start: Start | None,
    largest: float,
) -> tuple[bytearray, Start | None]:
    """The code with about the smallest step that keeps to a rate, and a start for the next call.

    Tables and indices depend on each other. Where nearly all indices are zero, a nonzero index
    costs so much that even more become zero: the size jumps. On a sample, tables converge while the
    step follows the rate; then the tables are fixed, and the size changes smoothly with the step.
    If the result is worse than any source needs, or empty, all steps are tried and the one of least
    error is taken. It is reused for some calls, as long as the error stays about the same.
    """
    room = _num_code_bytes(rate, x.numel())
    range_ = smallest_step(x, largest), largest * UNIT
    hint = None if start is None else start.hint
    followed: tuple[float, bytearray, Start | None] | None = None
    if start is not None and hint is not None:
        older = hint._replace(age=hint.age + 1)
        if hint.follows:
            followed = error, code, next_start = _follow_size(
                x, shapes, rms, rate, room, start, range_
            )
        else:
            code, found = _try_all_steps(x, shapes, rms, room, hint)
            error, next_start = found.error, start
        if (
            next_start is not None
            and error <= _MAX_HINT_ERROR_GROWTH * hint.error + 1e-9
            and older.age < _MAX_HINT_CALLS
        ):
            return code, next_start._replace(hint=older)
    error, code, start = followed or _follow_size(x, shapes, rms, rate, room, start, range_)
    bound = 4.0 ** -(8 * max(room - 24, 0) / x.numel())  # of a Gaussian; all others are easier
    most = min((1.3 if rate < 4 else 1.6) * bound, 0.5 + 0.5 * bound)
    near = error <= most and len(code) >= 0.9 * room
    if room >= _MAX_SPARED_BYTES and (near or error <= 1e-4 * bound):
        return code, start
    other, found = _try_all_steps(x, shapes, rms, room, None)
    if found.error < error:
        return other, (start or make_fresh_start())._replace(hint=found)
    if start is not None:
        start = start._replace(hint=found._replace(error=error, follows=True))
    return code, start


def _follow_size(
    x: Tensor,
    shapes: Shapes,
    rms: float,
    rate: float,
    room: int,
    start: Start | None,
    range_: tuple[float, float],
) -> tuple[float, bytearray, Start | None]:
    """The code of least error found by following the size, with that error: 1 if all is zero.

    `range_` are the smallest and the largest step.
    """
    if room < _MIN_TRELLIS_BYTES:
        return 1.0, bytearray([NOTHING]), None
    guess = math.log2(rms)
    tried: Quantised | None = None
    shape, last = tail_shape(x, rms), start
    if start is not None and (start.choice is None or not start.choice.holds(shape)):
        start = None
    if start is not None:
        tried = quantise(x, shapes, 2.0 ** (guess + start.step), start.prior, lowest=range_[0])
        if not 0.7 <= tried.num_bytes / max(room, 1) <= 1.4:
            start = tried = None
    is_anew = start is None
    if start is None:
        start = _sampled_start(x, shapes, guess, rate, room, guess + 1 - rate, Way.PLAIN, range_)
        sample = take_sample(x, shapes, SAMPLE_NUMEL)
        if (
            start
            and rate >= MIN_SIGNED_BITS
            and prefers_signs(*sample, 2.0 ** (guess + start.step))
        ):
            at = guess + start.step
            start = _sampled_start(x, shapes, guess, rate, room, at, Way.SIGNED, range_) or start
        if start and rate >= MIN_PLANE_BITS and x.numel() >= MIN_PLANE_NUMEL:
            at = guess + start.step
            plane = preferred_plane(*sample, 2.0**at, start.prior.way)
            at += math.log2(PLANE_STEP_FACTOR)
            if plane is not None:
                start = _sampled_start(x, shapes, guess, rate, room, at, plane, range_) or start
    if start is None:
        return 1.0, bytearray([NOTHING]), None
    at, slope = guess + start.step, start.slope
    lowest, highest = range_
    low: _Point | None = None  # a step too small
    high: _Point | None = None
    best, code, least = start, bytearray([NOTHING]), 1.0
    for _ in range(_MAX_TRIES):
        tried = tried or quantise(x, shapes, 2.0**at, start.prior, lowest=lowest)
        size = tried.num_bytes
        if size < 1.005 * room:  # an estimate is not enough
            own = tried.code()
            size = len(own)
            error = tried.error if size <= room else math.inf
            if error < least:
                # A single pass starts from rougher contexts than those that its code is in.
                kept = tried.prior if num_passes(x) > 1 else start.prior
                best = Start(at - guess, slope, kept)
                least, code = error, own
            if room * (1 - _LOG2_SLACK) <= size <= room or room - 2 <= size <= room:
                break
        point, tried = (at, math.log2(size / max(room, 1))), None
        before = low if size > room else high
        if size > room:
            low = point
        else:
            high = point
        if low and high:
            slope = _slope(low, high)
            share = (low[1] - _LOG2_AIM) / (low[1] - high[1])
            at = low[0] + (high[0] - low[0]) * min(max(share, 0.1), 0.9)
            if high[0] - low[0] < 0.003:
                break
        else:
            if before:
                slope = _slope(before, point)
            at += min(max((point[1] - _LOG2_AIM) / slope, -2.0), 2.0)
        if not lowest <= 2.0**at <= highest:
            break
    choice = Choice(shape, shape, least, least)
    if last is not None and last.choice is not None and best.prior.way is last.prior.way:
        if is_anew:
            choice = last.choice.confirmed(choice)
        else:
            choice = last.choice._replace(last=least, age=last.choice.age + 1)
    return least, code, best._replace(choice=choice)


def _try_all_steps(
    x: Tensor, shapes: Shapes, rms: float, room: int, hint: "Hint | None"
) -> tuple[bytearray, "Hint"]:
    """The code of least error of all kinds and steps, or of those near a hint, and where it was."""
    found = [encode_peaks(x, room), encode_plain(x, room)]
    errors = [(error, Hint(error, 0.0, Way.PLAIN)) for error, _ in found]
    if room >= _MIN_TRELLIS_BYTES:
        error, code, at, way = _best_step(x, shapes, rms, room, hint)
        found.append((error, code))
        errors.append((error, Hint(error, at - math.log2(rms), way)))
    best = min(range(len(found)), key=lambda i: found[i][0])
    return found[best][1], errors[-1][1]._replace(error=found[best][0])


def _best_step(
    x: Tensor, shapes: Shapes, rms: float, room: int, hint: "Hint | None"
) -> tuple[float, bytearray, float, Way]:
    """The least error of all steps, where a part of the vector may get no bits.

    Sizes jump where all numbers are about equally large: they take one bit each or none. Between
    the two, the part of least energy becomes zero; with feedback that is another part in the next
    step.
    """
    sample, own = take_sample(x, shapes, SAMPLE_NUMEL)
    found: list[tuple[float, float, Way, float]] = []

    def look(at: float, way: Way) -> float:
        tried = quantise(sample, own, 2.0**at, None, 2, None, way)
        excess = _excess(tried, x, sample, room)
        spared = max(0.0, 1 - 2.0**-excess)
        found.append((tried.error * (1 - spared) + spared, at, way, spared))
        return excess

    if hint is None:
        at = math.log2(largest_magnitude(x)) + 1
        for _ in range(_NUM_GRID_STEPS):
            if 2.0**at < smallest_step(x) or look(at, Way.PLAIN) > 2:
                break
            at -= 1
        _, at, way, _ = min(found)
        for move in (0.0, -1.0, 1.0):
            look(at + move, Way.SIGNED)
        for width in (0.5, 0.25):
            _, at, way, _ = min(found)
            look(at - width, way)
            look(at + width, way)
    else:
        look(math.log2(rms) + hint.step, hint.way)
    least, code = 1.0, bytearray([NOTHING])
    _, at, way, spared = min(found)
    low, high = -1.0, 1.0  # shares that are too small, and that will do
    for _ in range(_MAX_TRIES):
        kept, lost = _drop_run(x, spared)
        tried = quantise(kept, shapes, 2.0**at, None, NUM_ROUNDS, None, way)
        fresh = tried.code()
        error = tried.error * (1 - lost) + lost if len(fresh) <= room else math.inf
        if error < least:
            least, code = error, fresh
        share = len(fresh) / room
        if len(fresh) > room:
            low = spared
        elif spared == 0.0 or share > 1 - _LOG2_SLACK or len(fresh) >= room - 1:
            break
        else:
            high = spared
        spared = max(0.0, 1 - (1 - spared) / share * (1 - _LOG2_SLACK / 3))
        if not low < spared < high:
            spared = max(0.0, low + high) / 2
        if (high - low) * x.numel() < 1:
            break
    return least, code, at, way


def _drop_run(x: Tensor, share: float) -> tuple[Tensor, float]:
    """The vector without a run of this share of its length, and its share of the energy: the least.

    All runs of the length are looked at.
    """
    run = min(math.ceil(share * x.numel()), x.numel())
    if not run:
        return x, 0.0
    sums = torch.zeros(x.numel() + 1, dtype=torch.float64, device="cpu")
    torch.cumsum((x.double() / largest_magnitude(x)).square(), 0, out=sums[1:])
    energies = sums[run:] - sums[: sums.numel() - run]
    first = int(energies.argmin())
    kept = x.clone()
    kept[first : first + run] = 0
    return kept, float(energies[first] / sums[-1])


def _num_code_bytes(rate: float, numel: int) -> int:
    """Bytes of a code: those of the rate, minus the payload's envelope.

    A payload may exceed the rate by 16 bytes, up to 256 bytes in total: otherwise a short vector
    would get no bits and would never be sent.
    """
    own = rate * numel / 8
    total = int(max(own, min(own + _SPARE_BYTES, _MAX_SPARED_BYTES)))
    length = 1
    while total - _ENVELOPE_BYTES - length >= 1 << 7 * length:
        length += 1
    return total - _ENVELOPE_BYTES - length


_Point = tuple[float, float]  # log2 of a step, log2 of its bytes over what there is room for


def _sampled_start(
    x: Tensor,
    shapes: Shapes,
    rms: float,
    rate: float,
    room: int,
    at: float,
    way: Way,
    range_: tuple[float, float],
) -> Start | None:
    """A step for the rate and tables that go with it, from samples; None if there is no room."""
    slope = min(max(1.44 / rate, 0.4), 6.0)
    least_slope = min(1.0 / rate, 1.0)
    lowest, highest = (math.log2(step) for step in range_)
    prior: Prior | None = None
    found: Start | None = None
    before: _Point | None = None
    sample, own = take_sample(x, shapes, SAMPLE_NUMEL)
    least = smallest_step(sample)
    for i in range(_MAX_SAMPLE_TRIES):
        at = min(max(at, lowest), highest)
        tried = quantise(sample, own, 2.0**at, prior, 1, num_passes(x), way, least)
        point = at, _excess(tried, x, sample, room)
        is_near = abs(point[1] - _LOG2_AIM) < 1
        if before and abs(before[0] - at) > 0.01:
            slope = max(_slope(before, point), least_slope)
        before = point
        move = min(max((point[1] - _LOG2_AIM) / slope, -2.0), 2.0)
        prior = tried.prior
        start = Start(at + move - rms, slope, prior)
        if is_near or found is None or move < 0:
            found = start
        if (abs(point[1] - _LOG2_AIM) < 0.03 and i >= 2) or (at in (lowest, highest) and i):
            break
        if not is_near:
            prior = None
        at += move
    if found is not None and x.numel() >= 4 * _CORRECTION_NUMEL:
        sample, own = take_sample(x, shapes, _CORRECTION_NUMEL)
        at = rms + found.step
        point = at, _excess(quantise(sample, own, 2.0**at, found.prior), x, sample, room)
        if abs(point[1] - _LOG2_AIM) < 1:
            found = found._replace(step=found.step + (point[1] - _LOG2_AIM) / slope)
    return found


def _excess(tried: Quantised, x: Tensor, sample: Tensor, room: int) -> float:
    """By how much x would be too long, as log2, if it were all like the sample."""
    share = x.numel() / sample.numel()
    size = tried.header + share * (tried.num_bytes - tried.header)
    return math.log2(size / max(room, 1))


def _slope(a: _Point, b: _Point) -> float:
    return min(max((a[1] - b[1]) / ((b[0] - a[0]) or 1e-9), 0.2), 40.0)
