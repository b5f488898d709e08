"""Which examples a worker sees in a step: a function of (rank, step) and nothing else, so that
simulator, processes and restarts agree without communication.

Without shards, one permutation per epoch orders all examples for all workers: n workers with
batch B see together, in every step, exactly the examples that one worker with batch n B sees.
With shards, every worker goes through its own, in an order that is new on each pass.
"""

import torch
from torch import Tensor

from gradwire.core.epochs import steps_per_epoch
from gradwire.core.key import Key
from gradwire.data.partition import DataPartition, Examples


class Sampler:
    def __init__(
        self,
        dataset: Examples,
        partition: DataPartition,
        num_workers: int,
        batch_size: int,
        key: Key,
    ) -> None:
        if num_workers < 1 or batch_size < 1:
            raise ValueError(
                f"a sampler needs at least 1 worker and a batch of 1, got {num_workers} workers "
                f"and a batch of {batch_size}"
            )
        if num_workers * batch_size > dataset.num_train:
            raise ValueError(
                f"{num_workers} workers with a batch of {batch_size} need "
                f"{num_workers * batch_size} examples per step, {dataset.name} has "
                f"{dataset.num_train}. Use a smaller batch or fewer workers."
            )
        self.num_examples = dataset.num_train
        self.num_workers = num_workers
        self.batch_size = batch_size
        self.key = key.shared()
        self.shards = partition.shards(dataset, num_workers, self.key.child("partition"))
        # only a memory of what `key` determines: the latest orders, by (rank or none, epoch)
        self._orders: dict[tuple[int | None, int], Tensor] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which the workers together draw the data set once.

        The examples that do not fill a last global batch are left out of that epoch (without
        shards); every epoch leaves out others.
        """
        return steps_per_epoch(self.num_examples, self.num_workers * self.batch_size)

    @property
    def num_examples_of_workers(self) -> tuple[int, ...]:
        """How many examples each worker has; without shards they share all equally."""
        if self.shards is None:
            return (self.num_examples // self.num_workers,) * self.num_workers
        return tuple(len(shard) for shard in self.shards)

    def indices(self, rank: int, step: int) -> Tensor:
        """Train indices of the batch of worker `rank` in its step `step`, int64 [batch_size]."""
        if not 0 <= rank < self.num_workers:
            raise ValueError(f"rank must lie in 0 .. {self.num_workers - 1}, got {rank}")
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        if self.shards is None:
            epoch, within = divmod(step, self.steps_per_epoch)
            start = (within * self.num_workers + rank) * self.batch_size
            return self._order(None, epoch, self.num_examples)[start : start + self.batch_size]
        return self._from_shard(self.shards[rank], rank, step)

    def indices_of_all(self, step: int) -> Tensor:
        """Those of all workers in one step, [num_workers, batch_size]."""
        if self.shards is None and step >= 0:
            epoch, within = divmod(step, self.steps_per_epoch)
            count = self.num_workers * self.batch_size
            order = self._order(None, epoch, self.num_examples)
            return order[within * count : (within + 1) * count].view(-1, self.batch_size)
        return torch.stack([self.indices(rank, step) for rank in range(self.num_workers)])

    def _from_shard(self, shard: Tensor, rank: int, step: int) -> Tensor:
        """A worker's passes over its shard, one after another, are cut into batches.

        So every pass uses every example, and a shard that is smaller than the batch, or does not
        divide by it, wraps around into the next pass: all batches have the same shape.
        """
        begin = step * self.batch_size
        end = begin + self.batch_size
        first, last = begin // len(shard), (end - 1) // len(shard)
        passes = [self._order(rank, i, len(shard)) for i in range(first, last + 1)]
        offset = first * len(shard)
        return shard[torch.cat(passes)[begin - offset : end - offset]]

    def _order(self, rank: int | None, epoch: int, size: int) -> Tensor:
        order = self._orders.get((rank, epoch))
        if order is None:
            # One older epoch is kept: asynchronous workers straddle the end of an epoch.
            for old in [k for k in self._orders if k[0] == rank and k[1] != epoch - 1]:
                del self._orders[old]
            key = self.key if rank is None else self.key.private(rank)
            order = key.at(epoch).child("shuffle").permutation(size)
            self._orders[rank, epoch] = order
        return order
