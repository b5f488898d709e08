"""Polar codes as quantisers (Korada and Urbanke 2010, "Polar codes are optimal for lossy source
coding"): a codeword near the vector, found by successive cancellation; rate * d bits of it travel.

Every element has a label of m bits that names a point; bit j of all labels is a codeword of the
j-th polar code. Successive cancellation decides it from soft information: the log-likelihood ratios
given the element and the lower bits, not the sign alone. See `coding/polar/gaussian.py` for the
points and ratios. The vector is decoded to scale * points[labels] with the scale of least squared
error. Up to 0.6 bits there are two points, and one code.

`sign >> polar(rate)` codes the signs that `sign` leaves, a uniform source, with bits in place of
ratios; a fraction D of them arrives wrong, so magnitudes shrink by 1 - 2 D.

The points are made for a Gaussian. `rotate=True` makes any vector near one, by a randomised
Hadamard transform, and then permutes the positions of the blocks: polar codes contain Walsh
functions, and a vector rotated by the same functions would not look like noise to the code.

Use it at 0.1 to 4 bits per element where every bit counts and gradients are no further from a
Gaussian than a rotation brings them; heavy tails are better left as they are, and coded by `dq`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.coding.polar.channel import bsc_digest
from gradwire.coding.polar.gaussian import BINS_PER_DEVIATION, gaussian_channel
from gradwire.coding.polar.lanes import Lanes
from gradwire.coding.polar.planes import gaussian_planes, rows_on, sign_plane, sign_ratios
from gradwire.compression.quantization._rotation import rotate, unrotate
from gradwire.compression.quantization.sign import Sign
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    Traits,
    check_input,
    clamp_to,
    expect,
    expect_scale,
    payload_context,
    scale_dtype,
)
from gradwire.core.fusion import Fusion
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

_MAX_RATE_BITS = 4.0
_MIN_BLOCK, _MAX_BLOCK = 64, 2**19
_WHOLE_VECTOR = 1 << 40  # elements rotated together: as many as there are
_MIN_DEVIATION, _MAX_DEVIATION = 2.0**-50, 2.0**50  # deviations whose squares float32 can add


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
        if not 0 < self.rate <= _MAX_RATE_BITS:
            raise ValueError(
                f"polar: rate is in bits per element, above 0 and at most {_MAX_RATE_BITS:g}; "
                f"got {self.rate}"
            )
        if not _MIN_BLOCK <= self.block <= _MAX_BLOCK or self.block & (self.block - 1):
            raise ValueError(
                f"polar: block is the positions of a code, a power of two in {_MIN_BLOCK} .. "
                f"{_MAX_BLOCK}; got {self.block}"
            )

    @property
    def traits(self) -> Traits:
        return Traits(biased=True, following=self._behind, fingerprint=self._fingerprint)

    def _behind(self, first: Codec) -> Codec:
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

    def _fingerprint(self) -> int:
        return gaussian_channel(self.rate).digest

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        if not x.numel():
            return {"scale": x.new_zeros(0), "code": x.new_zeros(0, dtype=torch.uint8)}, state
        dtype = scale_dtype(x.dtype)
        x, factor = x.to(dtype), 1.0
        unit = _deviation(x)
        if not _MIN_DEVIATION < unit < _MAX_DEVIATION and bool(x.any()):  # squares run out of range
            factor = float(x.abs().max())
            x = x / factor
            unit = _deviation(x)
        if self.rotate:
            x = rotate(rotate(x, key, _WHOLE_VECTOR), key.child("again"), _WHOLE_VECTOR)
        gain, code = self._encode_points(x.float(), unit or 1.0, key)
        scale = gain.reshape(1).clamp(min=0) * factor
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
        order = self._permutation(lanes, key, code.device)
        rows, words, start = lanes.cut(code, planes.num_rows), [], 0
        for j, own in enumerate(planes.rows):
            words.append(lanes.bits(planes.word(j, rows[:, start : start + len(own)]), order))
            start += len(own)
        points = gaussian_channel(self.rate).points.to(code.device)
        if not self.rotate:
            return _look_up_points(words, clamp_to(points * scale, spec.dtype), lanes.numel)
        # Once mixes all only if their number is a power of two, so it was done twice. Back from
        # points of unit size, which cannot overflow; the factor comes last.
        decoded = _look_up_points(words, points.to(dtype), lanes.numel)
        decoded = unrotate(unrotate(decoded, key.child("again"), _WHOLE_VECTOR), key, _WHOLE_VECTOR)
        return clamp_to(decoded * scale, spec.dtype)

    def _encode_points(self, x: Tensor, unit: float, key: Key) -> tuple[Tensor, Tensor]:
        """The best factor (float64) of what is decoded, and the code of x (float32, of deviation
        `unit`)."""
        lanes, channel = self._lanes(x.numel()), gaussian_channel(self.rate)
        planes, order = gaussian_planes(self.rate, lanes), self._permutation(lanes, key, x.device)
        if channel.num_bits == 1 and order is None:
            code = kernels.empty(lanes.num_bytes(planes.num_rows), torch.uint8, x.device)
            return self._encode_signs(x, unit, lanes, code), code
        labels = x.new_zeros(x.numel(), dtype=torch.uint8)
        inputs = []
        for j, kinds in enumerate(planes.kinds):
            if channel.num_bits == 1:  # point 0, bit 0, is the negative one
                ratios = kernels.polar_ratios(x, -channel.slope / unit)
            else:
                per_bin = BINS_PER_DEVIATION / unit
                ratios = kernels.polar_lookup(x, per_bin, channel.ratios[j], labels)
            word = kernels.polar_quantise(lanes.spread(ratios, order), kinds)
            kernels.polar_label(labels, lanes.bits(word, order), j)
            inputs.append(planes.inputs(j, word))
        values = x.new_zeros(256)
        values[: len(channel.points)] = channel.points.to(x.device)
        along, squares = kernels.cell_products(x, labels, x.numel(), values, (256, 8, 0))
        return along / squares, lanes.join(torch.cat(inputs, dim=1))

    def _encode_signs(self, x: Tensor, unit: float, lanes: Lanes, code: Tensor) -> Tensor:
        """The same for two points in their order; the code goes into the memory given."""
        planes, channel = gaussian_planes(self.rate, lanes), gaussian_channel(self.rate)
        point = float(channel.points[1])
        along = kernels.polar_encode_signs(
            x,
            -channel.slope / unit,
            point,
            lanes.num_blocks,
            lanes.width,
            planes.kinds[0],
            rows_on(planes, 0, x.device),
            code,
        )
        return along / (x.numel() * point**2)

    @property
    def fusion(self) -> "_PolarFusion":
        return _PolarFusion(self)

    def encode_in_place(self, x: Tensor) -> Payload | None:
        """The payload of a float32 tensor of two points, written where it is sent from.

        None if squares of x leave the range. The one number that the host reads of x is their sum:
        it is finite if and only if x is, since float64 holds it.
        """
        lanes, numel = self._lanes(x.numel()), x.numel()
        flat = x.detach().reshape(-1).contiguous()
        squares = float(kernels.bucket_squares(flat, numel))
        if not math.isfinite(squares):
            check_input(self, x)
        unit = math.sqrt(squares / numel)
        if squares and not _MIN_DEVIATION < unit < _MAX_DEVIATION:
            return None
        num_bytes = lanes.num_bytes(gaussian_planes(self.rate, lanes).num_rows)
        kinds = {"scale": (torch.float32, 1), "code": (torch.uint8, num_bytes)}
        payload = Payload.blank(kinds, payload_context(self, Spec.of(x)), x.device)
        gain = self._encode_signs(flat, unit or 1.0, lanes, payload.parts["code"])
        payload.parts["scale"].copy_(clamp_to(gain.clamp(min=0), torch.float32))
        return payload

    def _lanes(self, numel: int) -> Lanes:
        return Lanes(numel, self.block)

    def _permutation(self, lanes: Lanes, key: Key, device: torch.device) -> Tensor | None:
        """A permutation of the rotated positions, equal on all ranks."""
        if not self.rotate:
            return None
        words = key.shared().child("polar positions").words(lanes.used, device)
        return torch.argsort(words, stable=True)


class _PolarFusion(Fusion[Polar]):
    """Codes of two points, which are the fast ones, and one look at x."""

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State] | None:
        codec = self.codec
        if not isinstance(x, Tensor) or not x.numel() or codec.rotate or not kernels.fuses(x):
            return None
        if gaussian_channel(codec.rate).num_bits > 1:
            return None
        payload = codec.encode_in_place(x)
        return None if payload is None else (payload, state)


def _look_up_points(words: list[Tensor], points: Tensor, numel: int) -> Tensor:
    """The points that the packed bits of all planes name."""
    if len(words) > 1:
        labels = words[0].new_zeros(numel)
        for j, bits in enumerate(words):
            kernels.polar_label(labels, bits, j)
        if points.dtype == torch.float32:
            return kernels.polar_points(labels, points)
        return points[labels.to(torch.int64)]
    if kernels.fuses(points):  # a zero names the first point, which is negative
        return kernels.mean_signs(
            words, [points[:1]], numel, 8 * numel, kernels.empty(numel, device=points.device)
        )
    return points[kernels.unpack_uints(words[0], 1, numel).to(torch.int64)]


def _deviation(x: Tensor) -> float:
    return math.sqrt(float(kernels.bucket_squares(x, x.numel())) / x.numel())


@dataclass(frozen=True, repr=False)
class _PolarSigns(Codec):
    """`polar` behind `sign`: codes bits, and decodes how likely each of them is a one."""

    rate: float
    block: int

    leaves = Kind.NOTHING
    parts = ("code",)

    def __repr__(self) -> str:
        return repr(Polar(self.rate, self.block))

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee()  # not lossless, as coders of symbols are

    @property
    def traits(self) -> Traits:
        return Traits(takes=Kind.SYMBOLS, fingerprint=self._fingerprint)

    def _fingerprint(self) -> int:
        return bsc_digest(self.rate)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        if not x.numel():
            return {"code": x.new_zeros(0, dtype=torch.uint8)}, state
        lanes = Lanes(x.numel(), self.block)
        planes, _ = sign_plane(self.rate, lanes)
        llr = lanes.spread(sign_ratios(x, self.rate))
        word = kernels.polar_quantise(llr, planes.kinds[0])
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
