"""Scaled sign: one bit per element (Karimireddy et al. 2019, "Error feedback fixes SignSGD").

C(x) = (|x|_1 / d) sign(x), with sign(0) = +1. It is a contraction with
delta = |x|_1^2 / (d |x|_2^2), which is 2/pi for a Gaussian and never less than 1/d.
With `bucket` every so many elements have a scale of their own, so that delta is at least 1/bucket.

Use it as `ef(sign)`, the simplest one-bit method. Where magnitudes differ much between layers, as
they do in real gradients, give it a `bucket`, or rotate: there `ef(drive(unbiased=False))` errs
less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.compression.quantization._buckets import from_buckets, num_buckets, to_buckets
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
    in_shape,
    payload_context,
    scale_dtype,
    without_graph,
)
from gradwire.core.fusion import Fusion, Residual
from gradwire.core.key import Key
from gradwire.core.payload import Payload, frame
from gradwire.core.payload_header import Frame
from gradwire.core.payload_rows import PayloadRows
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Sign(Codec):
    """Send one bit per element, and the mean magnitude."""

    bucket: int = 0  # elements that share one scale, a multiple of 8; 0: all of them

    paper = (
        "Karimireddy et al. 2019, Error feedback fixes SignSGD and other gradient compression "
        "schemes"
    )
    examples = ("sign", "sign(bucket=64)")

    leaves = Kind.SYMBOLS
    parts = ("scale", "values")

    def __post_init__(self) -> None:
        if self.bucket < 0 or self.bucket % 8:
            raise ValueError(
                f"sign: bucket must be a multiple of 8, or 0 for one scale, got {self.bucket}"
            )

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(delta=1 / max(1, min(self.bucket_length(spec.numel), spec.numel)))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        # float64: the sum of a long float32 vector may overflow where its mean does not.
        means = kernels.mean_magnitudes(x, self.bucket_length(x.numel()))
        if x.dtype == torch.float64 and not bool(torch.isfinite(means).all()):  # so may its own
            smaller = kernels.mean_magnitudes(x * 2.0**-64, self.bucket_length(x.numel()))
            means = torch.where(torch.isfinite(means), means, smaller * 2.0**64)
        return {"scale": self.sent_scales(means, x), "values": x < 0}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        scale, bucket = self.received_scales(parts, spec), self.bucket_length(spec.numel)
        signs = to_buckets(1 - 2 * parts["values"], bucket)
        return from_buckets(scale[: len(signs), None] * signs, spec.numel).to(spec.dtype)

    @cached_property
    def fusion(self) -> "_SignFusion":
        return _SignFusion(self)

    def bucket_length(self, numel: int) -> int:
        """Elements that share one scale."""
        return self.bucket or max(1, numel)

    def sent_scales(self, means: Tensor, x: Tensor) -> Tensor:
        """Scales as they are sent. An empty vector has one, too."""
        if not self.bucket and not x.numel():
            means = means.new_zeros(1)
        dtype = scale_dtype(x.dtype)
        return means.clamp(max=torch.finfo(dtype).max).to(dtype)

    def num_scales(self, numel: int) -> int:
        return _num_scales(self.bucket, numel)

    def received_scales(self, parts: Parts, spec: Spec, is_own: bool = False) -> Tensor:
        count, dtype = self.num_scales(spec.numel), scale_dtype(spec.dtype)
        if is_own:
            return expect(parts["scale"], "scale", count, dtype)
        return expect_scale(parts["scale"], count, dtype)


def _num_scales(bucket: int, numel: int) -> int:
    return num_buckets(numel, bucket) if bucket else 1


class _Plan(NamedTuple):
    """What payloads of float32 tensors of one length have in common."""

    kinds: dict[str, tuple[torch.dtype, int]]
    frame: Frame


@lru_cache(maxsize=1024)
def _plan(bucket: int, numel: int) -> _Plan:
    kinds = {
        "scale": (torch.float32, _num_scales(bucket, numel)),
        "values": (torch.uint8, -(-numel // 8)),
    }
    return _Plan(kinds, frame(kinds))


class _SignFusion(Fusion[Sign]):
    """Correction, signs, scales and what is lost in one pass; means of packed signs."""

    takes_rows = True
    averages = True

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State] | None:
        if not kernels.fuses(x):
            return None
        return self._payload(x, None, None), state

    def split_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Parts, Tensor, State] | None:
        if not isinstance(residual, Tensor) or not kernels.fuses(x, residual):
            return None
        lost = kernels.empty(x.numel(), device=x.device) if out is None else out
        scale, packed = self._encoded(x, residual, lost)
        return {"scale": scale, "values": kernels.unpack_uints(packed, 1, x.numel())}, lost, state

    def encode_feedback(
        self, x: Tensor, residual: Residual, state: State, key: Key, out: Tensor | None = None
    ) -> tuple[Payload, Tensor, State] | None:
        if not isinstance(residual, Tensor) or not kernels.fuses(x, residual):
            return None
        lost = kernels.empty(x.numel(), device=x.device) if out is None else out
        return self._payload(x, residual, lost), in_shape(lost, x), state

    def decode(
        self, payload: Payload, spec: Spec, key: Key, out: Tensor | None = None
    ) -> Tensor | None:
        return self._mean([payload], spec, out)

    def decode_mean(
        self, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]
    ) -> Tensor | None:
        return self._mean(payloads, spec, None)

    def _mean(self, payloads: Sequence[Payload], spec: Spec, out: Tensor | None) -> Tensor | None:
        if spec.dtype != torch.float32:
            return None
        codec, numel = self.codec, spec.numel
        bucket = codec.bucket or max(1, numel)
        found = _plan(codec.bucket, numel).frame
        buffers = [b for p in payloads if (b := p.own_bytes(found)) is not None]
        if numel and len(buffers) == len(payloads):
            scale_at, packed_at = found.offsets
            mean = kernels.mean_signs_in(buffers, scale_at, packed_at, numel, bucket, out)
            return mean if len(spec.shape) == 1 else mean.reshape(spec.shape)
        if not kernels.fuses(*(p.parts["scale"] for p in payloads)):
            return None
        num_bytes, device = -(-numel // 8), payloads[0].parts["scale"].device
        mean = kernels.mean_signs(
            [expect(p.parts["values"], "values", num_bytes, torch.uint8) for p in payloads],
            [codec.received_scales(p.parts, spec, p.is_own)[:numel] for p in payloads],
            numel,
            bucket,
            kernels.empty(numel, device=device) if out is None else out,
        )
        return mean if len(spec.shape) == 1 else mean.reshape(spec.shape)

    def _payload(self, x: Tensor, residual: Tensor | None, lost: Tensor | None) -> Payload:
        """The kernels are started first; the payload around their memory is made meanwhile."""
        codec, numel, device = self.codec, x.numel(), x.device
        kinds, found = _plan(codec.bucket, numel)
        buffer = kernels.empty(found.nbytes, torch.uint8, device)
        if numel:
            given = without_graph(x), None if residual is None else without_graph(residual)
            bucket = codec.bucket or numel
            kernels.encode_signs_in(*given, bucket, lost, buffer, *found.offsets)
        payload = Payload.framed(buffer, kinds, found, payload_context(codec, Spec.of(x)))
        if numel:
            check_encoded(codec, x, payload, "scale")
        else:
            payload.unchecked("scale").zero_()
        return payload

    def encode_rows(
        self, x: Tensor, residual: Residual | None, keys: Sequence[Key], out: Tensor | None
    ) -> Sequence[Payload] | None:
        codec, (count, numel) = self.codec, x.shape
        if isinstance(residual, kernels.Motion) or not numel or not kernels.fuses(x, residual):
            return None
        context = payload_context(codec, Spec((numel,), x.dtype))
        rows = PayloadRows(_plan(codec.bucket, numel).kinds, context, x.device, count)
        scale, packed = kernels.encode_signs_rows(x, residual, codec.bucket_length(numel), out)
        rows.write(scale=scale, values=packed)
        return rows.checked(codec, x, scale)

    def _encoded(
        self, x: Tensor, residual: Tensor | None, lost: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scales as they travel, and packed signs."""
        codec = self.codec
        scale, packed = kernels.encode_signs(x, residual, codec.bucket_length(x.numel()), lost)
        if not bool(torch.isfinite(scale).all()):
            check_input(codec, kernels.with_residual(x, residual))
        return codec.sent_scales(scale, x), packed
