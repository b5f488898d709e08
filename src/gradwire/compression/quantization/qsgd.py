"""QSGD (Alistarh et al. 2017, "QSGD: communication-efficient SGD via gradient quantization").

Each bucket of elements is divided by its norm and rounded at random to one of s + 1 levels:
Q(v_i) = norm * sign(v_i) * xi_i,  E xi_i = |v_i| / norm   (their sec. 3.1).  It is unbiased, with
relative variance at most min(b / s^2, sqrt(b) / s) for buckets of b elements (Lemma 3.1). With the
maximum in place of the Euclidean norm, as in their experiments, rounding a fraction p costs
p(1 - p) <= 1/4 of a squared step, so b / (4 s^2) holds. Rounding draws 16 bits per element, as in
the other quantisers that round at random: it is unbiased but for 2^-17 of a step.

Use it as the first unbiased quantiser to try, at 4 to 8 bits, without `ef(...)` and with `>> rans`,
which makes up for long buckets if tails are heavy. Without a coder `adaptive` and `eden` err less
at equal bits, above all at 3 and below.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import (
    from_buckets,
    num_buckets,
    round_at_random,
    to_buckets,
)
from gradwire.compression.quantization._scales import bucket_scale, check_levels, levels_above_zero
from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    check_input,
    clamp_to,
    expect,
    expect_scale,
    scale_dtype,
)
from gradwire.core.errors import WireError
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.spec import Spec
from gradwire.core.symbols import digits_per_byte, packed_bytes, symbol_bits
from gradwire.kernels.reference.levels import headroom


@dataclass(frozen=True, repr=False)
class QSGD(Codec):
    """Round at random to a few levels between plus and minus the norm of a bucket."""

    levels: int | None = None  # s: levels above zero
    bits: int | None = None  # of one element: s = 2^(bits - 1) - 1
    bucket: int = 512  # elements that share one norm
    norm: Literal["max", "l2"] = "max"

    paper = "Alistarh et al. 2017, QSGD: communication-efficient SGD via gradient quantization"
    examples = ("qsgd(bits=4)", "qsgd(1)", "qsgd(5, bucket=64)", 'qsgd(3, norm="l2")')

    leaves = Kind.SYMBOLS
    parts = ("scale", "values")

    def __post_init__(self) -> None:
        check_levels("qsgd", self.levels, self.bits)
        if self.bucket < 1:
            raise ValueError(f"qsgd: bucket must be at least 1, got {self.bucket}")
        if self.norm not in ("max", "l2"):
            raise ValueError(f'qsgd: norm is "max" or "l2", got {self.norm!r}')

    @property
    def num_levels(self) -> int:
        return levels_above_zero(self.levels, self.bits)

    def guarantee(self, spec: Spec) -> Guarantee:
        s, b = self.num_levels, max(1, min(self.bucket, spec.numel))
        step = 4 if self.norm == "max" else 1
        return Guarantee(omega=min(b / (step * s * s), math.sqrt(b) / s))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2 * self.num_levels + 1)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        if self._fuses(x):
            return self._unpacked(*self._kernel(x, None, None, key), x.numel()), state
        s = self.num_levels
        dtype = scale_dtype(x.dtype)
        buckets = to_buckets(x.to(dtype), self.bucket)  # [num_buckets, bucket]
        scale = bucket_scale(buckets, self.norm) if x.numel() else buckets.new_zeros(0)
        # A norm rounded down to the wire's dtype may lie below the largest element: that is clamped
        # to the top level.
        raised = headroom(scale)
        factor = torch.where(scale > 0, s / (scale * raised), torch.zeros_like(scale))
        scaled = from_buckets(buckets * raised[:, None] * factor[:, None], x.numel())
        levels = round_at_random(scaled.clamp(-s, s), key) + s
        return {"scale": scale, "values": levels.to(torch.int32)}, state

    def split_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Parts, Tensor, State]:
        if not self._fuses(x, residual):
            return super().split_feedback(x, residual, state, key)
        lost = kernels.empty(x.numel())
        return self._unpacked(*self._kernel(x, residual, lost, key), x.numel()), lost, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        s = self.num_levels
        dtype = scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], num_buckets(spec.numel, self.bucket), dtype)
        levels = to_buckets(parts["values"].to(dtype) - s, self.bucket)
        raised = headroom(scale)
        # Divided by a number, CUDA would multiply by its reciprocal.
        step = scale * raised / scale.new_tensor(s)
        heard = levels * step[:, None] * (1 / raised)[:, None]
        return clamp_to(from_buckets(heard, spec.numel), spec.dtype)

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        if not self._fuses(x):
            return super().encode(x, state, key)
        return self._fused(x.detach(), None, None, key), state

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        if not self._fuses(x, residual):
            return super().encode_feedback(x, residual, state, key)
        lost = kernels.empty(x.numel())
        payload = self._fused(x.detach(), residual.detach(), lost, key)
        return payload, lost.reshape(x.shape), state

    def decode(self, payload: Payload, spec: Spec, key: Key) -> Tensor:
        packed, alphabet = payload.parts["values"], 2 * self.num_levels + 1
        if spec.dtype != torch.float32 or not self._fuses(payload.parts["scale"]):
            return super().decode(payload, spec, key)
        expect(packed, "values", packed_bytes(spec.numel, alphabet), torch.uint8)
        scale = payload.parts["scale"]
        expect_scale(scale, num_buckets(spec.numel, self.bucket), torch.float32)
        width = symbol_bits(alphabet)
        heard, highest = kernels.decode_levels(
            packed,
            scale,
            self.num_levels,
            self.bucket,
            width,
            spec.numel,
            kernels.empty(spec.numel),
        )
        if highest >= alphabet:
            raise WireError(f"symbol {highest}, expected 0 .. {alphabet - 1}")
        return heard.reshape(spec.shape)

    def _fuses(self, *tensors: Tensor) -> bool:
        """Whether the fused kernels serve: fixed width of at most a byte, maxima of whole bytes."""
        alphabet = 2 * self.num_levels + 1
        return (
            self.norm == "max"
            and self.bucket % 8 == 0
            and symbol_bits(alphabet) <= 8
            and not digits_per_byte(alphabet)
            and kernels.fuses(*tensors)
        )

    def _fused(self, x: Tensor, residual: Tensor | None, lost: Tensor | None, key: Key) -> Payload:
        scale, packed = self._kernel(x, residual, lost, key)
        return Payload.pack({"scale": scale, "values": packed}, self.context(Spec.of(x)))

    def _kernel(
        self, x: Tensor, residual: Tensor | None, lost: Tensor | None, key: Key
    ) -> tuple[Tensor, Tensor]:
        """Scales, and symbols at fixed width."""
        width = symbol_bits(2 * self.num_levels + 1)
        scale, packed = kernels.encode_levels(
            x, residual, self.num_levels, self.bucket, width, key.seed, key.stream, lost
        )
        if not bool(torch.isfinite(scale).all()):
            check_input(self, x if residual is None else x + residual)
        return scale, packed

    def _unpacked(self, scale: Tensor, packed: Tensor, count: int) -> Parts:
        width = symbol_bits(2 * self.num_levels + 1)
        return {"scale": scale, "values": kernels.unpack_uints(packed, width, count)}
