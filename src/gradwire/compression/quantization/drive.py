"""DRIVE (Vargaftik et al. 2021, "DRIVE: one-bit distributed mean estimation").

Rotate at random, send the signs and one scale:   decoded = R^T (S sign(Rx)).
unbiased:   S = |Rx|_2^2 / |Rx|_1   (E = x for a uniformly random rotation)
otherwise:  S = |Rx|_1 / d          (the S of least squared error)
Either way the squared error tends to that of a Gaussian: pi/2 - 1 and 1 - 2/pi of |x|^2.

R is a randomised Hadamard transform per block, as in their experiments, not a uniform rotation:
then E = x holds in the limit of long blocks only, so no omega is stated. Under error feedback take
unbiased=False: it contracts. Its error is |x|^2 - |Rx|_1^2 / d, and each coordinate of Rx is a sum
under random signs, of which E|.| is at least sqrt(1/2) of its deviation (Szarek 1976). Hence
E|Rx|_1^2 / d >= |x|^2 / 2: delta = 1/2 for every x, in expectation over the rotation.

Use it at one bit per element for gradients of any shape: the rotation makes the error the same for
all of them, where that of `sign` depends on the tails. Take `drive` with many workers,
`ef(drive(unbiased=False))` with few; more bits are `eden`, and `ef(sign)` spares the rotation.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import num_buckets
from gradwire.compression.quantization._powers import from_range, largest_magnitude
from gradwire.compression.quantization._rotation import (
    check_block,
    exponents,
    flip_streams,
    mixed_rows,
    rotatable,
    row_flips,
    row_length,
    safe_divisor,
    unmix,
)
from gradwire.compression.quantization._scales import bucket_sizes
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    check_encoded,
    check_input,
    expect,
    expect_scale,
    payload_context,
    scale_dtype,
)
from gradwire.core.fusion import Fusion
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec

_ROTATED = (torch.float32, torch.float64)
_FUSED = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, repr=False)
class Drive(Codec):
    """Rotate at random, send one bit per coordinate and a scale per block."""

    unbiased: bool = True  # else the scale of least squared error
    block: int = 4096  # elements rotated together

    paper = "Vargaftik et al. 2021, DRIVE: one-bit distributed mean estimation"
    examples = ("drive", "drive(unbiased=False)", "drive(block=64)")

    leaves = Kind.SYMBOLS
    parts = ("scale", "values")

    def __post_init__(self) -> None:
        check_block("drive", self.block)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee() if self.unbiased else Guarantee(delta=0.5)

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        scale, packed = self.rotated_signs(x, key)
        symbols = [kernels.unpack_uints(bits, 1, count) for bits, count in packed]
        return {"scale": scale, "values": torch.cat(symbols)}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        values, whole = parts["values"], self.num_in_rows(spec)
        rows = kernels.pack_uints(values[:whole], 1)
        return self.unrotated(rows, values[whole:], parts["scale"], spec, key)

    @property
    def fusion(self) -> "_DriveFusion":
        return _DriveFusion(self)

    def num_in_rows(self, spec: Spec) -> int:
        """How many coordinates lie in whole rows."""
        return spec.numel - spec.numel % row_length(spec.numel, self.block)

    def rotated_signs(
        self, x: Tensor, key: Key, largest: float | None = None
    ) -> tuple[Tensor, list[tuple[Tensor, int]]]:
        """Scales, and signs of rows and of the rest: packed bits, 1 where not negative."""
        x, shift = rotatable(x, largest)
        m = row_length(x.numel(), self.block)
        pieces, end = mixed_rows(x, key, self.block)
        packed: list[tuple[Tensor, int]] = []
        norms: list[tuple[Tensor, ...]] = []
        for rows, flips in pieces:
            bits, *both = kernels.rotated_signs(rows, flips)
            packed.append((bits, rows.numel()))
            norms.append(tuple(both))
        if len(end):
            packed.append((kernels.pack_uints(end >= 0, 1), len(end)))
            norms.append(kernels.row_norms(end.reshape(1, -1)))
        sums, squares = (torch.cat(of) for of in zip(*norms))  # [num_groups]
        if self.unbiased:
            scale = squares / safe_divisor(sums)
        else:
            scale = sums / bucket_sizes(x.numel(), m, x.device)
        return from_range(scale, shift, x.dtype), packed

    def unrotated(self, rows: Tensor, end: Tensor, scale: Tensor, spec: Spec, key: Key) -> Tensor:
        """From the packed signs of rows, and the symbols of the rest."""
        dtype, m = scale_dtype(spec.dtype), row_length(spec.numel, self.block)
        expect_scale(scale, num_buckets(spec.numel, m), dtype)
        (scale, shift), whole = rotatable(scale), spec.numel // m
        flips = row_flips(spec.numel, key, self.block, scale.device)
        x = torch.empty(spec.numel, dtype=dtype, device=scale.device)
        out = x[: whole * m].reshape(whole, m)
        kernels.unrotated_signs(rows, scale[:whole], m, flips, out=out)
        x[whole * m :] = (2 * end - 1) * scale[whole:]
        return from_range(unmix(x, key, self.block), shift, spec.dtype)


class _DriveFusion(Fusion[Drive]):
    """Bits that were packed while in the cache stay packed, where rows are whole bytes."""

    def _serves(self, spec: Spec) -> bool:
        return row_length(spec.numel, self.codec.block) >= 8

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State] | None:
        codec, spec = self.codec, Spec.of(x)
        if not self._serves(spec):
            return None
        sent = self._sent_at_once(x, key)
        if sent is not None:
            return sent, state
        # One look at x tells whether all is finite and whether it can be rotated as it is.
        largest = largest_magnitude(x.detach()) if x.dtype in _ROTATED else None
        if largest is None or not math.isfinite(largest):
            check_input(codec, x)
        scale, packed = codec.rotated_signs(x.detach().reshape(-1).contiguous(), key, largest)
        parts = {"scale": scale, "values": torch.cat([bits for bits, _ in packed])}
        return Payload.pack(parts, payload_context(codec, spec)), state

    def _sent_at_once(self, x: Tensor, key: Key) -> Payload | None:
        """The payload that one kernel writes, on an accelerator; nobody waits for it."""
        codec, spec, dtype = self.codec, Spec.of(x), scale_dtype(x.dtype)
        m = row_length(spec.numel, codec.block)
        if x.dtype not in _FUSED or not kernels.encodes_rotated_signs(x.device, dtype, m):
            return None
        kinds = {
            "scale": (dtype, num_buckets(spec.numel, m)),
            "values": (torch.uint8, -(-spec.numel // 8)),
        }
        payload = Payload.blank(kinds, payload_context(codec, spec), x.device)
        into = payload.parts["scale"], payload.parts["values"]
        wide, how = (
            x.detach().to(dtype),
            (m, key.seed, flip_streams(key), codec.unbiased, exponents(dtype)),
        )
        check_encoded(codec, x, payload, kernels.encode_rotated_signs(wide, *how, into))
        return payload

    def decode(
        self, payload: Payload, spec: Spec, key: Key, out: Tensor | None = None
    ) -> Tensor | None:
        if not self._serves(spec):
            return None
        codec, scale, packed = self.codec, payload.parts["scale"], payload.parts["values"]
        expect(packed, "values", -(-spec.numel // 8), torch.uint8)
        whole = codec.num_in_rows(spec)
        end = kernels.unpack_uints(packed[whole // 8 :], 1, spec.numel - whole)
        flat = codec.unrotated(packed[: whole // 8], end, scale, spec.flat(), key)
        return flat.reshape(spec.shape)
