"""Wait-free backpropagation (Zhang et al. 2017, Poseidon, sec. 3.1; Awan et al. 2017, S-Caffe).

The gradient of a layer is complete when the backward pass leaves it. Its exchange starts then,
while the backward pass goes on to the layers before it. With t_b(l) the time at which the gradient
of layer l is there and t_c(l) the time of its exchange, the step ends at the latest of
t_b(l) + (what is exchanged after it), instead of t_b(1) + sum t_c.

When to use it: whenever something is exchanged per layer. Many small tensors cost a latency and the
fixed cost of coding each: then merge them (`fusion`, `mgwfbp`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.core.profile import Profile
from gradwire.core.protocols import Backward, Bucket, Reduce, Scheduling
from gradwire.scheduling._ready import exchange_when_ready


@dataclass(frozen=True, repr=False)
class WFBP(Scheduling):
    """Exchange each tensor as soon as its gradient is there."""

    paper = "Zhang et al. 2017, Poseidon"

    @property
    def overlaps(self) -> bool:
        return True

    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        return list(tensors)

    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        await exchange_when_ready(backward, buckets, reduce)
