"""Tensor fusion (Sergeev and Del Balso 2018, Horovod, sec. 4; Li et al. 2020, DDP, sec. 3.2).

Tensors are merged into buckets of up to so many bytes, in the order in which the backward pass
leaves them, last tensor first. A bucket is exchanged when the gradients of all its tensors are
there. The first bucket to leave may be smaller, so that something is under way early: DDP's are
25 MiB, the first one 1 MiB.

When to use it: as the baseline, and where nothing is known of times of layers and of the network.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.core.profile import Profile
from gradwire.core.protocols import Backward, Bucket, Reduce, Scheduling
from gradwire.scheduling._ready import check_nbytes, exchange_when_ready, fuse

_MIB = 1 << 20


@dataclass(frozen=True, repr=False)
class Fusion(Scheduling):
    """Merge tensors into buckets of a size, and exchange each when it is complete."""

    nbytes: int = 25 * _MIB  # of a bucket of float32; a larger tensor is a bucket of its own
    first: int = _MIB  # of the bucket that leaves first

    paper = "Li et al. 2020, PyTorch Distributed"
    examples = ("fusion", "fusion(1000000)", "fusion(20000, first=4000)")

    def __post_init__(self) -> None:
        check_nbytes(self, "nbytes", self.nbytes)
        check_nbytes(self, "first", self.first)

    @property
    def overlaps(self) -> bool:
        return True

    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        return fuse(tensors, self.nbytes, min(self.first, self.nbytes))

    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        await exchange_when_ready(backward, buckets, reduce)
