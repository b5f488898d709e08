"""Scaled sign: one bit per element (Karimireddy et al. 2019, "Error feedback fixes SignSGD").

C(x) = (|x|_1 / d) sign(x), with sign(0) = +1. It is a contraction with
delta = |x|_1^2 / (d |x|_2^2), which is 2/pi for a Gaussian and never less than 1/d.
"""

from dataclasses import dataclass

from torch import Tensor, float64

from gradwire.core.codec import (
    Codec,
    Guarantee,
    Kind,
    Parts,
    State,
    expect_scale,
    scale_dtype,
)
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Sign(Codec):
    """Send one bit per element, and the mean magnitude."""

    paper = (
        "Karimireddy et al. 2019, Error feedback fixes SignSGD and other gradient compression "
        "schemes"
    )

    leaves = Kind.SYMBOLS
    parts = ("scale", "values")

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(delta=1 / max(1, spec.numel))

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, spec.dtype, alphabet=2)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        dtype = scale_dtype(x.dtype)
        # The sum of a long float32 vector may overflow where its mean does not.
        mean = x.abs().sum(dtype=float64) / max(1, x.numel())
        return {"scale": mean.to(dtype).reshape(1), "values": x < 0}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        scale = expect_scale(parts["scale"], 1, scale_dtype(spec.dtype))
        return (scale * (1 - 2 * parts["values"])).to(spec.dtype)
