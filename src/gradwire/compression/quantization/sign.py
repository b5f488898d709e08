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
    check_input,
    expect,
    expect_scale,
    scale_dtype,
)
from gradwire.core.key import Key
from gradwire.core.payload import Payload
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
        return Guarantee(delta=1 / max(1, min(self._bucket(spec.numel), spec.numel)))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        # float64: the sum of a long float32 vector may overflow where its mean does not.
        means = kernels.mean_magnitudes(x, self._bucket(x.numel()))
        if x.dtype == torch.float64 and not bool(torch.isfinite(means).all()):  # so may its own
            smaller = kernels.mean_magnitudes(x * 2.0**-64, self._bucket(x.numel()))
            means = torch.where(torch.isfinite(means), means, smaller * 2.0**64)
        return {"scale": self._scales(means, x), "values": x < 0}, state

    def split_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Parts, Tensor, State]:
        if not kernels.fuses(x, residual):
            return super().split_feedback(x, residual, state, key)
        lost = kernels.empty(x.numel())
        scale, packed = self._kernel(x, residual, lost)
        return {"scale": scale, "values": kernels.unpack_uints(packed, 1, x.numel())}, lost, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        scale, bucket = self._expected(parts, spec), self._bucket(spec.numel)
        signs = to_buckets(1 - 2 * parts["values"], bucket)
        return from_buckets(scale[: len(signs), None] * signs, spec.numel).to(spec.dtype)

    def encode(self, x: Tensor, state: State, key: Key) -> tuple[Payload, State]:
        if not kernels.fuses(x):
            return super().encode(x, state, key)
        return self._fused(x.detach(), None, None), state

    def encode_feedback(
        self, x: Tensor, residual: Tensor, state: State, key: Key
    ) -> tuple[Payload, Tensor, State]:
        if not kernels.fuses(x, residual):
            return super().encode_feedback(x, residual, state, key)
        lost = kernels.empty(x.numel())
        payload = self._fused(x.detach(), residual.detach(), lost)
        return payload, lost.reshape(x.shape), state

    def decode(self, payload: Payload, spec: Spec, key: Key) -> Tensor:
        mean = self._fused_mean([payload], spec)
        return super().decode(payload, spec, key) if mean is None else mean

    def decode_mean(self, payloads: Sequence[Payload], spec: Spec, keys: Sequence[Key]) -> Tensor:
        mean = self._fused_mean(payloads, spec)
        return super().decode_mean(payloads, spec, keys) if mean is None else mean

    def _fused_mean(self, payloads: Sequence[Payload], spec: Spec) -> Tensor | None:
        if spec.dtype != torch.float32 or not kernels.fuses(*(p.parts["scale"] for p in payloads)):
            return None
        num_bytes = -(-spec.numel // 8)
        mean = kernels.mean_signs(
            [expect(p.parts["values"], "values", num_bytes, torch.uint8) for p in payloads],
            [self._expected(p.parts, spec)[: spec.numel] for p in payloads],
            spec.numel,
            self._bucket(spec.numel),
            kernels.empty(spec.numel),
        )
        return mean.reshape(spec.shape)

    def _fused(self, x: Tensor, residual: Tensor | None, lost: Tensor | None) -> Payload:
        scale, packed = self._kernel(x, residual, lost)
        return Payload.pack({"scale": scale, "values": packed}, self.context(Spec.of(x)))

    def _kernel(
        self, x: Tensor, residual: Tensor | None, lost: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Scales as they travel, and packed signs."""
        scale, packed = kernels.encode_signs(x, residual, self._bucket(x.numel()), lost)
        if not bool(torch.isfinite(scale).all()):
            check_input(self, x if residual is None else x + residual)
        return self._scales(scale, x), packed

    def _bucket(self, numel: int) -> int:
        return self.bucket or max(1, numel)

    def _scales(self, means: Tensor, x: Tensor) -> Tensor:
        """As they travel. One scale is sent even of nothing."""
        if not self.bucket and not x.numel():
            means = means.new_zeros(1)
        dtype = scale_dtype(x.dtype)
        return means.clamp(max=torch.finfo(dtype).max).to(dtype)

    def _expected(self, parts: Parts, spec: Spec) -> Tensor:
        count = num_buckets(spec.numel, self.bucket) if self.bucket else 1
        return expect_scale(parts["scale"], count, scale_dtype(spec.dtype))
