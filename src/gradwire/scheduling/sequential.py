"""Communication after computation, one piece after the other: the schedule without overlap."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gradwire.core.profile import Profile
from gradwire.core.protocols import Backward, Bucket, Reduce, Scheduling
from gradwire.core.rows import cut


@dataclass(frozen=True, repr=False)
class Sequential(Scheduling):
    """Exchange everything after the backward pass, as one vector or layer by layer."""

    granularity: Literal["model", "layer"] = "model"

    known_as = ("none", "no", "off")
    paper = "Tang et al. 2020, Communication-efficient distributed deep learning, sec. 7"

    def __post_init__(self) -> None:
        if self.granularity not in ("model", "layer"):
            raise ValueError(
                f'sequential: granularity is "model" or "layer", got {self.granularity!r}'
            )

    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        if self.granularity == "layer":
            return list(tensors)
        return [Bucket("model", tensors[0].start, tensors[-1].stop)]

    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        gradient = await backward.whole()
        for bucket in buckets:
            await reduce(bucket, cut(gradient, bucket.start, bucket.stop))
