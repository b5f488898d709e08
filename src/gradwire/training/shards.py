"""Cuts the flat parameter vector into shards, and buckets into the units that are pushed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gradwire.core.protocols import Bucket

_SNAP = 0.1  # of a shard's size: how far a cut may move to spare a tensor


@dataclass(frozen=True, slots=True)
class Unit:
    """A range that is encoded in one piece, and the number of its server, if it has one."""

    bucket: Bucket
    server: int = 0

    def lies_in(self, bucket: Bucket) -> bool:
        return bucket.start <= self.bucket.start and self.bucket.stop <= bucket.stop


def cut_into_shards(tensors: Sequence[Bucket], num_servers: int) -> list[Bucket]:
    """One contiguous shard per server, of nearly equal sizes.

    Small tensors that lie side by side come together, large ones are cut. A cut that falls near
    the end of a tensor is moved there.
    """
    if num_servers < 1:
        return []
    total = tensors[-1].stop
    if total < num_servers:
        raise ValueError(
            f"{num_servers} servers for {total} parameters: some would hold none. Take fewer."
        )
    size = total / num_servers
    ends = [tensor.stop for tensor in tensors]
    cuts = [0]
    for number in range(1, num_servers):
        ideal = round(number * size)
        nearest = min(ends, key=lambda end: abs(end - ideal))
        cut = nearest if abs(nearest - ideal) <= _SNAP * size else ideal
        cuts.append(min(max(cut, cuts[-1] + 1), total - (num_servers - number)))
    cuts.append(total)
    return [Bucket(f"shard {i}", a, b) for i, (a, b) in enumerate(pairwise(cuts))]


def cut_at_shards(buckets: Sequence[Bucket], shards: Sequence[Bucket]) -> list[Unit]:
    """The pieces of each bucket that lie in one shard."""
    units = []
    for bucket in buckets:
        for server, shard in enumerate(shards):
            start, stop = max(bucket.start, shard.start), min(bucket.stop, shard.stop)
            if start < stop:
                whole = (start, stop) == (bucket.start, bucket.stop)
                name = bucket.name if whole else f"{bucket.name} / {server}"
                units.append(Unit(Bucket(name, start, stop), server))
    return units
