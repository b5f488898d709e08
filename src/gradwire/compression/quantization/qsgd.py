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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
    check_encoded,
    check_input,
    clamp_to,
    expect,
    expect_scale,
    in_shape,
    payload_context,
    scale_dtype,
    without_graph,
)
from gradwire.core.decoded_rows import DenseRows
from gradwire.core.errors import WireError
from gradwire.core.fusion import Fusion, Residual
from gradwire.core.key import Key
from gradwire.core.payload import Payload
from gradwire.core.payload_rows import PayloadRows
from gradwire.core.spec import Spec
from gradwire.core.symbols import digits_per_byte, symbol_bits
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
        fused = _QSGDFusion(self)  # a subclass may have none
        if fused.serves(x):
            return fused.split(x, key), state
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

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        s = self.num_levels
        dtype = scale_dtype(spec.dtype)
        scale = expect_scale(parts["scale"], num_buckets(spec.numel, self.bucket), dtype)
        levels = to_buckets(parts["values"].to(dtype) - s, self.bucket)
        raised = headroom(scale)
        # Divided by a number, CUDA would multiply by its reciprocal.
        step = scale * raised / scale.new_tensor(s)
        decoded = levels * step[:, None] * (1 / raised)[:, None]
        return clamp_to(from_buckets(decoded, spec.numel), spec.dtype)

    @cached_property
    def fusion(self) -> "_QSGDFusion":
        return _QSGDFusion(self)


class _QSGDFusion(Fusion[QSGD]):
    """Correction, norms, rounding, packing and what is lost in one pass."""

    takes_rows = True

    def __init__(self, codec: QSGD) -> None:
        super().__init__(codec)
        self._num_levels = codec.num_levels
        self._alphabet = 2 * codec.num_levels + 1
        self._width = symbol_bits(self._alphabet)
        # Fixed width of at most a byte, maxima of whole bytes.
        self._fits = (
            codec.norm == "max"
            and codec.bucket % 8 == 0
            and self._width <= 8
            and not digits_per_byte(self._alphabet)
        )

    def serves(self, *tensors: Tensor) -> bool:
        """Whether the fused kernels do."""
        return self._fits and kernels.fuses(*tensors)

    def split(self, x: Tensor, key: Key) -> Parts:
        """The parts of a vector that it serves."""
        return self._unpacked(*self._encoded(x, None, None, key), x.numel())

    def split_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Parts, Tensor, State] | None:
        if not isinstance(residual, Tensor) or not self.serves(x, residual):
            return None
        lost = kernels.empty(x.numel(), device=x.device) if out is None else out
        return self._unpacked(*self._encoded(x, residual, lost, key), x.numel()), lost, state

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State] | None:
        if not self.serves(x):
            return None
        return self._payload(x, None, None, key), state

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State] | None:
        if not isinstance(residual, Tensor) or not self.serves(x, residual):
            return None
        lost = kernels.empty(x.numel(), device=x.device) if out is None else out
        return self._payload(x, residual, lost, key), in_shape(lost, x), state

    def decode(
        self, payload: Payload, spec: Spec, key: Key, out: Tensor | None = None
    ) -> Tensor | None:
        codec, scale, packed = self.codec, payload.parts["scale"], payload.parts["values"]
        if spec.dtype != torch.float32 or not self.serves(scale):
            return None
        expect(packed, "values", -(-spec.numel * self._width // 8), torch.uint8)
        count = num_buckets(spec.numel, codec.bucket)
        if payload.is_own:
            expect(scale, "scale", count, torch.float32)
        else:
            expect_scale(scale, count, torch.float32)
        decoded, highest = kernels.decode_levels(
            packed,
            scale,
            self._num_levels,
            codec.bucket,
            self._width,
            spec.numel,
            kernels.empty(spec.numel, device=packed.device) if out is None else out,
            checked=not payload.is_own,
        )
        if highest >= self._alphabet:
            raise WireError(f"symbol {highest}, expected 0 .. {self._alphabet - 1}")
        return decoded if len(spec.shape) == 1 else decoded.reshape(spec.shape)

    def encode_rows(
        self, x: Tensor, residual: Residual | None, keys: Sequence[Key], out: Tensor | None
    ) -> Sequence[Payload] | None:
        codec, (count, numel) = self.codec, x.shape
        if isinstance(residual, kernels.Motion) or not numel:
            return None
        if not self.serves(x) or (residual is not None and not kernels.fuses(residual)):
            return None
        *stream, first = keys[0].stream
        if any(key.stream != (*stream, first + row) for row, key in enumerate(keys)):
            return None  # the kernel draws for ranks in a row
        context = payload_context(codec, Spec((numel,), x.dtype))
        rows = PayloadRows(self._kinds(numel), context, x.device, count)
        how = self._num_levels, codec.bucket, self._width, keys[0].seed, keys[0].stream
        scale, packed = kernels.encode_levels_rows(x, residual, *how, out)
        rows.write(scale=scale, values=packed)
        payloads = rows.checked(codec, x, scale)

        def decode() -> Tensor:
            return kernels.decode_levels_rows(packed, scale, *how[:3], numel)

        DenseRows(codec, Spec((numel,), x.dtype), count, decode).note(payloads)
        return payloads

    def _payload(
        self, x: Tensor, residual: Tensor | None, lost: Tensor | None, key: Key
    ) -> Payload:
        codec = self.codec
        context = payload_context(codec, Spec.of(x))
        payload = Payload.blank(self._kinds(x.numel()), context, x.device)
        scale, packed = payload.parts.values()
        given = without_graph(x), None if residual is None else without_graph(residual)
        self._encode(*given, lost, key, (scale, packed))
        check_encoded(codec, x, payload, scale)
        return payload

    def _kinds(self, numel: int) -> dict[str, tuple[torch.dtype, int]]:
        return {
            "scale": (torch.float32, num_buckets(numel, self.codec.bucket)),
            "values": (torch.uint8, -(-numel * self._width // 8)),
        }

    def _encode(
        self,
        x: Tensor,
        residual: Tensor | None,
        lost: Tensor | None,
        key: Key,
        into: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Scales, and symbols at fixed width."""
        how = self._num_levels, self.codec.bucket, self._width, key.seed, key.stream
        return kernels.encode_levels(x, residual, *how, lost, into)

    def _encoded(
        self, x: Tensor, residual: Tensor | None, lost: Tensor | None, key: Key
    ) -> tuple[Tensor, Tensor]:
        """The same, once it is known that all is finite."""
        scale, packed = self._encode(x, residual, lost, key, None)
        if not bool(torch.isfinite(scale).all()):
            check_input(self.codec, kernels.with_residual(x, residual))
        return scale, packed

    def _unpacked(self, scale: Tensor, packed: Tensor, count: int) -> Parts:
        return {"scale": scale, "values": kernels.unpack_uints(packed, self._width, count)}
