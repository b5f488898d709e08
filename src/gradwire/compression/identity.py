"""No compression: the tensor itself. The baseline that everything is measured against.

Use it as the baseline, where the network is no bottleneck, and in `partition` for tensors too small
to be worth compressing. To halve the traffic at next to no loss take `fp16` or `bf16`.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.core.codec import Algebra, Codec, Guarantee, Parts, State, Traits
from gradwire.core.key import Key
from gradwire.core.spec import Spec


@dataclass(frozen=True, repr=False)
class Identity(Codec):
    """Send every element as it is."""

    known_as = ("none", "no", "off", "dense", "raw", "uncompressed", "float32", "fp32")

    algebra = Algebra.LINEAR
    traits = Traits(selects=True)

    def guarantee(self, spec: Spec) -> Guarantee:
        return Guarantee(omega=0.0, delta=1.0)

    def split(self, x: Tensor, state: State, key: Key) -> tuple[Parts, State]:
        return {"values": x}, state

    def join(self, parts: Parts, spec: Spec, key: Key) -> Tensor:
        return parts["values"]
