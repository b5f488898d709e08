"""Polar codes as quantisers (Korada and Urbanke 2010, "Polar codes are optimal for lossy source
coding"): a codeword near the vector, found by successive cancellation; rate * d bits of it travel.

Every element has a label of m bits that names a point; bit j of all labels is a codeword of the
j-th polar code. Successive cancellation decides it by what the element, and the bits below, say of
it: soft, not the sign alone. See `coding/polar/gaussian.py` for the points and what elements say.
The vector is decoded to scale * points[labels] with the scale of least squared error. Up to 0.6
bits there are two points, and one code.

`sign >> polar(rate)` codes the signs that `sign` leaves, a uniform source, with bits in place of
ratios; a fraction D of them arrives wrong, so magnitudes shrink by 1 - 2 D.

The points are made for a Gaussian. `rotate=True` makes any vector near one, by a randomised
Hadamard transform, and then permutes the positions of the blocks: polar codes contain Walsh
functions, and what is rotated by the same functions would not meet the code as noise does.

Use it at 0.1 to 4 bits per element where every bit counts and gradients are no further from a
Gaussian than a rotation brings them; heavy tails are better left as they are, and coded by `dq`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.gaussian import BINS_PER_DEVIATION, gaussian_channel
from gradwire.coding.polar.lanes import Lanes
from gradwire.coding.polar.planes import gaussian_planes, sign_plane, sign_ratios
from gradwire.compression.quantization._buckets import clamp_to
from gradwire.compression.quantization._rotation import bound, rotate, saturated, unrotate
from gradwire.compression.quantization.sign import Sign
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    expect,
    expect_scale,
    scale_dtype,
)
from gradwire.core.key import Key
from gradwire.core.spec import Spec

_MOST_BITS = 4.0
_SHORTEST, _LONGEST = 64, 2**19
_ALL = 1 << 40  # elements rotated together: as many as there are
_LEAST, _MOST = 2.0**-50, 2.0**50  # deviations whose squares float32 can add


@dataclass(frozen=True, repr=False)
class Polar(Codec):
    """Send the free bits of polar codewords near the vector, close to Shannon's bound."""

    rate: float  # bits per element
    block: int = 8192  # positions of a code, a power of two: longer is better and slower
    rotate: bool = False  # makes any vector near Gaussian

    paper = "Korada and Urbanke 2010, Polar codes are optimal for lossy source coding"
    examples = (
        "polar(0.5)",
        "polar(1.0, block=1024)",
        "polar(0.25, block=256, rotate=True)",
        "sign >> polar(0.5, block=256)",
        "topk(0.3) >> polar(2.0, block=256)",
    )

    leaves = Kind.NOTHING
    parts = ("scale", "code")

    def __post_init__(self) -> None:
        if not 0 < self.rate <= _MOST_BITS:
            raise ValueError(
                f"polar: rate is in bits per element, above 0 and at most {_MOST_BITS:g}; "
                f"got {self.rate}"
            )
        if not _SHORTEST <= self.block <= _LONGEST or self.block & (self.block - 1):
            raise ValueError(
                f"polar: block is the positions of a code, a power of two in {_SHORTEST} .. "
                f"{_LONGEST}; got {self.block}"
            )

    def following(self, first: Codec) -> Codec:
        if first.leaves is not Kind.SYMBOLS:
            return self
        if not isinstance(first, Sign):
            raise ValueError(
                f"{first!r} >> {self!r}: of symbols, polar codes the signs of `sign` only; "
                f"write sign >> {self!r}, or {self!r} for real numbers"
            )
        if self.rotate or self.rate > 1:
            raise ValueError(
                f"{first!r} >> {self!r}: signs have no rotation, and a rate of at most 1 bit"
            )
        return _PolarSigns(self.rate, self.block)

    def context(self, spec: Spec) -> int:
        # A receiver whose code has other free inputs must not take this for its own.
        if not spec.numel:
            return super().context(spec)
        return super().context(spec) ^ gaussian_planes(self.rate, self._lanes(spec.numel)).digest

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        if not x.numel():
            return {"scale": x.new_zeros(0), "code": x.new_zeros(0, dtype=torch.uint8)}, state
        dtype = scale_dtype(x.dtype)
        x = x.to(dtype)
        if self.rotate:
            x = rotate(rotate(saturated(x), key, _ALL), key.child("again"), _ALL)
        rms = math.sqrt(float(torch.dot(x, x)) / x.numel())
        unit = rms
        if not _LEAST < rms < _MOST:  # squares run out of range: make it a vector like any other
            rms = float(torch.linalg.vector_norm(x, dtype=torch.float64)) / math.sqrt(x.numel())
            x, unit = x / rms if rms else x, 1.0
        heard, code = self._coded(x.float(), unit, key)
        power = float(torch.dot(heard, heard))
        gain = max(0.0, float(torch.dot(heard, x.float())) / power)
        scale = torch.tensor([gain * rms / unit], dtype=torch.float64, device=x.device)
        return {"scale": clamp_to(scale, dtype), "code": code}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        dtype = scale_dtype(spec.dtype)
        scale, code = parts["scale"], parts["code"]
        if not spec.numel:
            expect(scale, "scale", 0, spec.dtype)
            expect(code, "code", 0, torch.uint8)
            return scale
        lanes = self._lanes(spec.numel)
        planes = gaussian_planes(self.rate, lanes)
        expect_scale(scale, 1, dtype)
        expect(code, "code", lanes.num_bytes(planes.num_rows), torch.uint8)
        order = self._order(lanes, key, code.device)
        rows, words, start = lanes.cut(code, planes.num_rows), [], 0
        for j, own in enumerate(planes.rows):
            words.append(lanes.bits(planes.word(j, rows[:, start : start + len(own)]), order))
            start += len(own)
        heard = self._points(words, lanes).to(dtype)
        if not self.rotate:
            return clamp_to(heard * scale, spec.dtype)
        # Once mixes all only if their number is a power of two, so it was done twice.
        heard = unrotate(heard * scale.clamp(max=bound(dtype)), key.child("again"), _ALL)
        heard = unrotate(heard, key, _ALL)
        return clamp_to(heard, spec.dtype)

    def _coded(self, x: Tensor, unit: float, key: Key) -> tuple[Tensor, Tensor]:
        """What is heard of x (float32, of deviation `unit`) before it is scaled, and the code."""
        lanes, channel = self._lanes(x.numel()), gaussian_channel(self.rate)
        planes, order = gaussian_planes(self.rate, lanes), self._order(lanes, key, x.device)
        words, inputs = [], []
        labels = x.new_zeros(x.numel(), dtype=torch.uint8) if channel.num_bits > 1 else None
        for j, kinds in enumerate(planes.kinds):
            if labels is None:  # point 0, bit 0, is the negative one
                ratios = kernels.polar_ratios(x, -channel.slope / unit)
            else:
                per_bin = BINS_PER_DEVIATION / unit
                ratios = kernels.polar_lookup(x, per_bin, channel.ratios[j], labels)
            word = kernels.polar_quantise(lanes.spread(ratios, order), kinds.to(x.device))
            words.append(lanes.bits(word, order))
            inputs.append(planes.inputs(j, word))
            if labels is not None:
                kernels.polar_label(labels, words[-1], j)
        return self._points(words, lanes), lanes.join(torch.cat(inputs, dim=1))

    def _points(self, words: list[Tensor], lanes: Lanes) -> Tensor:
        """The points that packed bits of all planes name, float32 [numel]."""
        points = gaussian_channel(self.rate).points
        if len(words) == 1:
            # A zero stands for the first point, which is negative.
            scale, out = points[:1].to(words[0].device), None
            if words[0].device.type == "cpu":
                out = kernels.empty(lanes.numel)
            return kernels.mean_signs(words, [scale], lanes.numel, 8 * lanes.numel, out)
        labels = words[0].new_zeros(lanes.numel)
        for j, bits in enumerate(words):
            kernels.polar_label(labels, bits, j)
        return kernels.polar_points(labels, points)

    def _lanes(self, numel: int) -> Lanes:
        return Lanes(numel, self.block)

    def _order(self, lanes: Lanes, key: Key, device: torch.device) -> Tensor | None:
        """Where what was rotated goes: a permutation of the positions that all ranks draw."""
        if not self.rotate:
            return None
        words = key.shared().child("polar positions").words(lanes.used, device)
        return torch.argsort(words, stable=True)


@dataclass(frozen=True, repr=False)
class _PolarSigns(Codec):
    """`polar` behind `sign`: codes bits, and tells how likely each of them is a one."""

    rate: float
    block: int

    takes = Kind.SYMBOLS
    leaves = Kind.NOTHING
    parts = ("code",)

    def __repr__(self) -> str:
        return repr(Polar(self.rate, self.block))

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee()  # not lossless, as coders of symbols are

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        if not x.numel():
            return {"code": x.new_zeros(0, dtype=torch.uint8)}, state
        lanes = Lanes(x.numel(), self.block)
        planes, _ = sign_plane(self.rate, lanes)
        llr = lanes.spread(sign_ratios(x, self.rate))
        word = kernels.polar_quantise(llr, planes.kinds[0].to(x.device))
        return {"code": lanes.join(planes.inputs(0, word))}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        code = parts["code"]
        if not spec.numel:
            return expect(code, "code", 0, torch.uint8).to(scale_dtype(spec.dtype))
        lanes = Lanes(spec.numel, self.block)
        planes, wrong = sign_plane(self.rate, lanes)
        expect(code, "code", lanes.num_bytes(planes.num_rows), torch.uint8)
        word = planes.word(0, lanes.cut(code, planes.num_rows))
        bits = kernels.unpack_uints(lanes.bits(word), 1, spec.numel)
        return wrong + (1 - 2 * wrong) * bits.to(scale_dtype(spec.dtype))
