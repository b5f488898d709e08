"""DeAR (Zhang et al. 2023): all-reduce in two halves, one under backward, one under forward.

An all-reduce is a reduce-scatter, after which each worker has the mean of one shard, and an
all-gather, after which all have all of it. The reduce-scatter of a bucket runs while the backward
pass goes on. The all-gather can wait: it runs during the next forward pass, first layers first, and
a layer waits only for its own. So an exchange is hidden behind forward and backward, not behind
backward alone, and nothing of it is sent twice.

What is exchanged in one phase (payloads that everyone gathers, means between two workers) has no
second half to move: it is exchanged under backward as a whole, and the next forward pass waits for
it layer by layer.

When to use it: where an exchange takes longer than the backward pass but not longer than a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.core.node import Node
from gradwire.core.profile import Profile
from gradwire.core.protocols import Backward, Bucket, Reduce, Scheduling
from gradwire.scheduling._ready import check_nbytes, fuse

_NOTHING = torch.empty(0)


@dataclass(frozen=True, repr=False)
class DeAR(Scheduling):
    """Reduce-scatter under the backward pass, all-gather under the next forward pass."""

    nbytes: int = 25 << 20  # of a bucket of float32; a larger tensor is a bucket of its own

    paper = "Zhang et al. 2023, DeAR: fine-grained all-reduce pipelining"
    examples = ("dear", "dear(20000)")

    def __post_init__(self) -> None:
        check_nbytes(self, "nbytes", self.nbytes)

    @property
    def overlaps(self) -> bool:
        return True

    @property
    def overlaps_forward(self) -> bool:
        return True

    @property
    def has_priorities(self) -> bool:
        return True

    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        return fuse(tensors, self.nbytes, self.nbytes)

    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        node, tasks = backward.node, []
        gates = [_LocalGate(node, number) for number in range(len(buckets))]
        for number in reversed(range(len(buckets))):
            x = await backward.ready(buckets[number])
            program = reduce(buckets[number], x, gates[number].wait)
            tasks.append(await node.spawn(program, priority=len(buckets) - number))
        for gate in gates:
            await gate.open()
        for task in tasks:
            await node.join(task)


class _LocalGate:
    """Lets a program of this node wait for another."""

    def __init__(self, node: Node, number: int) -> None:
        self._node = node
        self._tag = ("gate", number)
        self._is_open = self._is_waited_for = False

    async def wait(self) -> None:
        if not self._is_open:
            self._is_waited_for = True
            await self._node.recv(self._node.rank, self._tag)

    async def open(self) -> None:
        self._is_open = True
        if self._is_waited_for:
            await self._node.send(self._node.rank, self._tag, _NOTHING)
