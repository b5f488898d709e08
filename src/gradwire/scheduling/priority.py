"""Priority scheduling (Jayarajan et al. 2019, P3; Hashemi et al. 2019, TicTac; Peng et al. 2019,
ByteScheduler).

The next forward pass needs the first layers first, but the backward pass makes their gradients
last. So messages of earlier layers have priority over those of later ones, large tensors are cut
into partitions at whose boundaries the network can be yielded, small ones are merged into
partitions, and at most `credit` bytes are under way: what has not left can still be overtaken. The
next forward pass starts layer by layer as parameters arrive.

All ranks start partitions in one order, the one that the profile foresees; what is behind in it
waits, also where another rank has it already.

When to use it: where an exchange takes longer than the backward pass. With compression the
partitions are compressed one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from gradwire.core.node import RunningProgram
from gradwire.core.profile import Profile
from gradwire.core.protocols import Backward, Bucket, Reduce, Scheduling
from gradwire.scheduling._ready import VALUE_NBYTES, check_nbytes, cut, merge

_MIB = 1 << 20


@dataclass(frozen=True, repr=False)
class Priority(Scheduling):
    """Exchange the first layers first, in partitions, and start the next forward early."""

    partition: int = 4 * _MIB  # bytes of float32
    credit: int = 16 * _MIB  # bytes of partitions under way

    paper = "Peng et al. 2019, A generic communication scheduler for distributed DNN training"
    examples = ("priority", "priority(40000, credit=160000)")

    def __post_init__(self) -> None:
        check_nbytes(self, "partition", self.partition)
        check_nbytes(self, "credit", self.credit)
        if self.credit < self.partition:
            raise ValueError(
                f"{self!r}: credit must be at least one partition, or none could leave"
            )

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
        partitions: list[Bucket] = []
        group: list[Bucket] = []  # small tensors
        for tensor in tensors:
            together = sum(one.numel for one in group) + tensor.numel
            if group and VALUE_NBYTES * together > self.partition:
                partitions.append(merge(group))
                group = []
            if VALUE_NBYTES * tensor.numel > self.partition:
                partitions += cut(tensor, self.partition)
            else:
                group.append(tensor)
        return partitions + ([merge(group)] if group else [])

    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        node = backward.node
        under_way: list[tuple[int, RunningProgram[None]]] = []
        for number in foreseen_order(buckets, backward.profile, self.credit):
            bucket = buckets[number]
            x = await backward.ready(bucket)
            nbytes = VALUE_NBYTES * bucket.numel
            while under_way and sum(size for size, _ in under_way) + nbytes > self.credit:
                await node.join(under_way.pop(0)[1])
            task = await node.spawn(reduce(bucket, x), priority=len(buckets) - number)
            under_way.append((nbytes, task))
        for _, task in under_way:
            await node.join(task)


def foreseen_order(buckets: Sequence[Bucket], profile: Profile, credit: int) -> list[int]:
    """The order in which buckets start if each takes the time that the profile says.

    Whenever there is credit, the first bucket of those whose gradients are there starts.
    """
    ends = profile.backward_ends()
    ready = [profile.total_s * ends[profile.first_layer(bucket)] for bucket in buckets]
    coming = sorted(range(len(buckets)), key=lambda number: (ready[number], number))
    waiting: list[int] = []
    order: list[int] = []
    running: list[tuple[float, int]] = []  # when it ends, bytes
    now = free_s = 0.0
    while len(order) < len(buckets):
        while coming and ready[coming[0]] <= now:
            heappush(waiting, coming.pop(0))
        while running and running[0][0] <= now:
            heappop(running)
        used = sum(nbytes for _, nbytes in running)
        if waiting:
            nbytes = VALUE_NBYTES * buckets[waiting[0]].numel
            if not running or used + nbytes <= credit:
                number = heappop(waiting)
                order.append(number)
                free_s = max(free_s, now) + profile.exchange_s(buckets[number].numel)
                heappush(running, (free_s, nbytes))
                continue
        following = [running[0][0]] if running else []
        if coming:
            following.append(ready[coming[0]])
        now = max(now, min(following))
    return order
