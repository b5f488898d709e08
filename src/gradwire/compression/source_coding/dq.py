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

From 0.7 bits on the quantisers can be selected by a plane of bits instead of the trellis: one bit
for each element, a word of a polar code, at the cost of a fraction of a bit (`_dq_plane.py`). Eight
states gain 1.09 of the 1.53 dB, the plane 1.33: on a Gaussian of 2 bits the error is 0.2 dB from
Shannon's bound instead of 0.5, on gradients 0 to 0.45 dB smaller. A sample decides, again whenever
the vectors change, and now and then. Encoding takes 1.3 times as long from some millions of
elements on, four times at tens of thousands; fewer than 2048 have the trellis.

Constants were chosen on the gradients in `experiment/studies/gradients.py`. On five that were not
used for it (two perceptrons, a ResNet, an LSTM and a transformer of other sizes, seeds and steps)
at 0.25 to 3 bits its error was 1.6 to over 60 times smaller than that of `topk >> fp16`, and from 1
bit on 8 times or more smaller than those of `qsgd >> rans` and `eden`, at their settings next to
the rate.

A short vector has no room for a trellis and its tables. Then each number is sent in a few bits, or
only the positions and signs of the largest, whichever errs least. A payload may be 16 bytes longer
than the rate says, as long as it has no more than 256, so that something is always sent. Numbers
that are all about as large (the survivors of `topk`) cost a bit each or none; at lower rates the
part of the vector with the least energy gets no bits.

All of it is computed on the CPU, on as many threads as torch has. Tensors of a GPU are copied into
page-locked memory, and the code back from there. A GPU would have too little to do side by side: a
context depends on the indices found before in its segment, and 95 segments (of 25 million elements)
are as many chains of 262,144 steps. The search on a sample is sequential on the CPU, too.

Use it where bits are scarce and a core can be spared: at 0.1 to 3 bits per element it errs less
than every other codec here, most of all on real gradients, at some tens of millions of elements a
second and core. It is biased: put `ef(...)` around it. Above 4 bits or so, or if time is short,
prefer `qsgd(...) >> rans` or `eden`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.plane import plane_digest
from gradwire.compression.quantization._powers import largest_magnitude, times_power
from gradwire.compression.source_coding._dq_quantised import (
    MIN_PLANE_NUMEL,
    SAMPLE_NUMEL,
    Prior,
    Way,
    num_passes,
    prefers_signs,
    quantise,
    quantise_at_step,
    quantise_plane_at_step,
    take_sample,
)
from gradwire.compression.source_coding._dq_search import encode_at_rate
from gradwire.compression.source_coding._dq_start import Start
from gradwire.compression.source_coding._dq_wire import (
    LARGE,
    NOTHING,
    SHIFT,
    SMALL,
    Shapes,
    decode_code,
)
from gradwire.core.codec import (
    Codec,
    Kind,
    Parts,
    State,
    Traits,
    expect,
    layout_in_state,
    scale_dtype,
)
from gradwire.core.key import Key
from gradwire.core.spec import Placed, Spec

_MAX_RULE_CALLS = 32  # with a given step, for which a choice of trellis or plane holds
_SUM_BLOCK = 1 << 14  # numbers that torch adds up in one thread
# Of largest magnitudes; a vector beyond is scaled by a power of two, which costs no bit.
_RANGES = {torch.float32: (2.0**-60, 2.0**100), torch.float64: (2.0**-400, 2.0**400)}


@dataclass(frozen=True, repr=False)
class DQ(Codec):
    """Two quantisers selected by a trellis or a polar code, rate in the search, contexts."""

    rate: float | None = None  # bits per element of the whole payload, see `_room`
    step: float | None = None  # of a trellis, in terms of the root mean square of the vector

    paper = "Fischer and Wang 1992, Entropy-constrained trellis-coded quantization"
    examples = ("dq(0.5)", "dq(2.0)", "dq(step=0.5)")

    leaves = Kind.NOTHING
    parts = ("code",)
    traits = Traits(biased=True, layout=layout_in_state, fingerprint=plane_digest)

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.step is None):
            raise ValueError("dq needs a rate or a step, one of them: dq(0.5) or dq(step=0.1)")
        if self.rate is not None and not 0 < self.rate <= 12:
            raise ValueError(f"dq: rate must lie in (0, 12] bits per element, got {self.rate}")
        if self.step is not None and not 2.0**-12 <= self.step <= 2.0**12:
            raise ValueError(f"dq: step must lie in 2^-12 .. 2^12, got {self.step}")

    def init(self, spec: Spec) -> State:
        return {"tensors": spec.layout, "start": None}

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        numbers = kernels.to_host(x.detach()).to(scale_dtype(x.dtype))
        state = state or {"tensors": None, "start": None}
        shapes = _shapes(state["tensors"], x.numel())
        code, start = self._encode_vector(numbers, shapes, state["start"])
        packed = kernels.from_host(torch.frombuffer(code, dtype=torch.uint8), x.device)
        return {"code": packed}, {**state, "start": start}

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        packed = expect(parts["code"], "code", parts["code"].numel(), torch.uint8)
        shapes = _shapes(spec.tensors, spec.numel)
        return decode_code(kernels.to_host(packed), shapes, spec).to(packed.device)

    def _encode_vector(self, x: Tensor, shapes: Shapes, last: State) -> tuple[bytearray, State]:
        """The code, and the start of the next search."""
        largest = largest_magnitude(x)
        if not largest:
            return bytearray([NOTHING]), last
        least, most = _RANGES[x.dtype]
        if not least <= largest <= most:
            exponent = SHIFT[x.dtype] if largest < least else -SHIFT[x.dtype]
            code, start = self._encode_vector(times_power(x, exponent), shapes, last)
            if code[0] != NOTHING:
                code[0] |= SMALL if largest < least else LARGE
            return code, start
        rms = _root_mean_square(x, largest)
        if self.step is not None:
            step = self.step * rms
            if last is None or last["age"] >= _MAX_RULE_CALLS:
                way, factor = _way_at_step(x, shapes, step)
                found = quantise_at_step(x, shapes, factor * step, way)
                last = {"factor": factor, "age": 0, **found.prior.state()}
            elif Way(last["way"]).is_plane:  # which takes its time: tables are known
                found = quantise(x, shapes, last["factor"] * step, Prior.of(last))
            else:
                found = quantise_at_step(x, shapes, step, Way(last["way"]))
            return found.code(), {**last, "age": last["age"] + 1}
        assert self.rate is not None
        start = None if last is None else Start.of(last)
        code, start = encode_at_rate(x, shapes, rms, self.rate, start, largest)
        return code, None if start is None else start.state()


def _way_at_step(x: Tensor, shapes: Shapes, step: float) -> tuple[Way, float]:
    """The rule with the fewest bits at the error of a trellis of this step, and its factor."""
    sample = take_sample(x, shapes, SAMPLE_NUMEL)
    way = Way.SIGNED if prefers_signs(*sample, step) else Way.PLAIN
    if x.numel() < MIN_PLANE_NUMEL:
        return way, 1.0
    return quantise_plane_at_step(*sample, step, way, num_passes(x)) or (way, 1.0)


def _root_mean_square(x: Tensor, largest: float | None = None) -> float:
    """The same whatever the number of threads: sums are of one length, or of few numbers.

    `largest` is the largest magnitude of x, if it is known.
    """
    if largest is None:
        largest = largest_magnitude(x)
    if not largest:
        return 0.0
    if not 1e-12 < largest < 1e12:
        x = x / largest
    rows, rest = x[: x.numel() // 1024 * 1024].view(-1, 1024), x[x.numel() // 1024 * 1024 :]
    norms = [torch.linalg.vector_norm(part, dim=-1).double() for part in (rows, rest)]
    few = (some for norm in norms for some in norm.reshape(-1).split(_SUM_BLOCK))
    mean = sum(float(some.square().sum()) for some in few) / x.numel()
    return math.sqrt(mean) * (1 if 1e-12 < largest < 1e12 else largest)


def _shapes(tensors: Sequence[Placed] | None, numel: int) -> Shapes:
    """The matrices in a vector; an inner stage of a chain knows none."""
    if tensors and tensors[-1][2] == numel and numel:
        return _matrices(tuple(tensors))
    return ((1, numel),)


@lru_cache(maxsize=1024)
def _matrices(tensors: tuple[Placed, ...]) -> Shapes:
    shapes = []
    for _, start, stop, shape in tensors:
        numel = stop - start
        if numel:
            rows = shape[0] if len(shape) > 1 else 1
            shapes.append((1, numel) if numel in (rows, 0) else (rows, numel // rows))
    return tuple(shapes)
