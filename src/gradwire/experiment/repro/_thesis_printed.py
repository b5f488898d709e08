"""The two compressors that the thesis prints (sec. 2.3.5.4), as it prints them, to show why they
lose. They are no part of the library: this module adds them to the processes of one recipe.

`thesis_one_bit` sends float16(bool(x)): one for every element that is not zero, whatever its
sign, and 16 bits of it. The receiver multiplies by a running mean of |x|, started again after
50,000 elements. So what is applied has no signs: it moves all parameters the same way. In the
thesis each process keeps a mean of its own, over its tensors in turn; here the sender's travels
along, and the tensors of a step are one vector.

`thesis_natural` sends int8(-ln|x| sgn(x)), cut off towards zero, and decodes sgn(t) exp(-|t|).
Its rounding is down by up to a factor of e, never up, so it is biased towards larger steps: the
cut-off makes |t| smaller, so exp(-|t|) larger. What is above 1/e in magnitude decodes to zero (t
= 0), and from 1 on the sign of the logarithm flips that of the element. In the thesis servers add
the logarithms up; here they are decoded first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.codec import Codec, Parts, State, Traits, expect
from gradwire.core.key import Key
from gradwire.core.spec import Spec
from gradwire.experiment.run.registries import register

_SOURCE = "Gradient compression with polar codes, thesis, Tongji University 2022"
_RESTART = 50_000  # elements of the running mean


@register
@dataclass(frozen=True, repr=False)
class ThesisOneBit(Codec):
    """Whether each element is not zero, in 16 bits, and a running mean of magnitudes."""

    paper = _SOURCE
    parts = ("values", "mean")
    traits = Traits(biased=True)

    def init(self, spec: Spec) -> State:
        return {"mean": 1.0, "count": 0}

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        state = state or self.init(Spec.of(x))
        mean, count = state["mean"], state["count"]
        own = float(x.abs().mean()) if x.numel() else mean
        if count > _RESTART:
            mean, count = own, x.numel()
        else:
            mean = (mean * count + x.numel() * own) / max(1, count + x.numel())
            count += x.numel()
        parts = {
            "values": (x != 0).to(torch.float16),
            "mean": torch.tensor([mean], dtype=torch.float32, device=x.device),
        }
        return parts, {"mean": mean, "count": count}

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, torch.float16)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        mean = expect(parts["mean"], "mean", 1, torch.float32)
        return parts["values"].to(spec.dtype) * mean.to(spec.dtype)


@register
@dataclass(frozen=True, repr=False)
class ThesisNatural(Codec):
    """The natural logarithm of each magnitude, cut off to a whole number, with the sign."""

    paper = _SOURCE
    traits = Traits(biased=True)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        logarithm = (-x.abs().log() * x.sign()).nan_to_num(0.0)  # of zero nothing is printed
        return {"values": logarithm.trunc().clamp(-127, 127).to(torch.int8)}, state

    def values_spec(self, spec: Spec, parts: Parts) -> Spec:
        return Spec(spec.shape, torch.int8)

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        values = parts["values"].to(spec.dtype)
        return values.sign() * (-values.abs()).exp()
