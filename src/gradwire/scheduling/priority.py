"""Priority scheduling (Jayarajan et al. 2019, P3; Hashemi et al. 2019, TicTac; Peng et al. 2019,
ByteScheduler).

The next forward pass needs the first layers first, but the backward pass makes their gradients
last. So messages of earlier layers have priority over those of later ones, large tensors are cut
into partitions at whose boundaries the network can be yielded, small ones are merged into
partitions, and at most `credit` bytes are under way: what has not left can still be overtaken. The
next forward pass starts layer by layer as parameters arrive.

A tensor that is merged with one of an earlier layer waits for that gradient, and the forward pass
of the earlier layer waits for the bytes of both. A tensor of its own costs one more exchange. Which
is worse depends on the profile. So tensors of one layer are merged up to a partition, as their
gradients come together and are needed together; tensors of several layers up to `merge` bytes.

ByteScheduler finds partition and credit by trials during a run. Here a profile foresees the time of
a step. What is not given is chosen so that it is shortest, and written into the expression:
`priority(50000, credit=200000, merge=4000)`.

All ranks start partitions in one order, the one that the profile foresees; what is behind in it
waits, also where another rank has it already.

When to use it: where an exchange takes longer than the backward pass. With compression the
partitions are compressed one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from gradwire.core.node import RunningProgram
from gradwire.core.profile import Profile
from gradwire.core.protocols import Backward, Bucket, Reduce, Scheduling
from gradwire.scheduling import _ready
from gradwire.scheduling._ready import VALUE_NBYTES, check_nbytes, cut

_SMALL_NBYTES = 1024  # smaller limits of merging are not tried
# Not worth more partitions: these shares of the exposed communication and of a gradient's time.
_UNCERTAIN, _NEGLIGIBLE = 0.1, 0.005
_MOST_PARTITIONS = 64  # of a model, besides its tensors, where the number is chosen here


@dataclass(frozen=True, repr=False)
class Priority(Scheduling):
    """Exchange the first layers first, in partitions, and start the next forward early."""

    # Bytes of float32; what is None is chosen by the profile.
    partition: int | None = None
    credit: int | None = None  # of partitions under way
    merge: int | None = None  # of partitions with tensors of several layers; 0: there are none

    paper = "Peng et al. 2019, A generic communication scheduler for distributed DNN training"
    examples = ("priority", "priority(40000, credit=160000, merge=4000)")

    def __post_init__(self) -> None:
        for name in ("partition", "credit"):
            nbytes = getattr(self, name)
            if nbytes is not None:
                check_nbytes(self, name, nbytes)
        if self.merge is not None and self.merge < 0:
            raise ValueError(f"{self!r}: merge is a number of bytes, at least 0, got {self.merge}")
        if self.credit is not None and self.credit < (self.partition or 0):
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

    @property
    def needs_prices(self) -> bool:
        return True

    def resolve(self, tensors: Sequence[Bucket], profile: Profile) -> "Priority":
        if None not in (self.partition, self.credit, self.merge):
            return self
        foreseen = [
            (own, foreseen_step(own.buckets(tensors, profile), profile, own.credit or 0))
            for own in self._choices(tensors)
        ]
        best_s = min(seconds for _, seconds in foreseen)
        exposed_s = max(0.0, best_s - profile.total_s)
        limit_s = best_s + _UNCERTAIN * exposed_s + _NEGLIGIBLE * profile.total_s
        return next(own for own, seconds in foreseen if seconds <= limit_s)

    def _choices(self, tensors: Sequence[Bucket]) -> Iterator["Priority"]:
        """From few partitions to many: of those that take about as long the first is chosen."""
        whole = VALUE_NBYTES * (tensors[-1].stop - tensors[0].start)
        partitions = [max(whole >> i, VALUE_NBYTES) for i in range(_MOST_PARTITIONS.bit_length())]
        if self.credit is not None:
            partitions = [own for own in partitions if own <= self.credit] or [self.credit]
        for partition in partitions if self.partition is None else [self.partition]:
            for merge in _quartered(partition) if self.merge is None else [self.merge]:
                for count in (1, 2, 4) if self.credit is None else [1]:
                    yield Priority(partition, self.credit or count * partition, merge)

    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        own = self.resolve(tensors, profile)
        assert own.partition is not None
        assert own.merge is not None
        partitions: list[Bucket] = []
        group: list[Bucket] = []  # small tensors
        for tensor in tensors:
            if group and not own._may_merge([*group, tensor], profile):
                partitions.append(_ready.merge(group))
                group = []
            if VALUE_NBYTES * tensor.numel > own.partition:
                partitions += cut(tensor, own.partition)
            else:
                group.append(tensor)
        return partitions + ([_ready.merge(group)] if group else [])

    def _may_merge(self, group: Sequence[Bucket], profile: Profile) -> bool:
        first, last = group[0], group[-1]
        is_one_layer = profile.first_layer(first) == profile.first_layer(last)
        most = self.partition if is_one_layer else self.merge
        return most is not None and VALUE_NBYTES * (last.stop - first.start) <= most

    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        node, credit = backward.node, self.credit
        assert credit is not None, "an expression that was not resolved"
        under_way: list[tuple[int, RunningProgram[None]]] = []
        for number in foreseen_order(buckets, backward.profile, credit):
            bucket = buckets[number]
            x = await backward.ready(bucket)
            nbytes = VALUE_NBYTES * bucket.numel
            while under_way and sum(size for size, _ in under_way) + nbytes > credit:
                await node.join(under_way.pop(0)[1])
            task = await node.spawn(reduce(bucket, x), priority=len(buckets) - number)
            under_way.append((nbytes, task))
        for _, task in under_way:
            await node.join(task)


def _quartered(nbytes: int) -> Iterator[int]:
    """A limit of merging, and smaller ones."""
    yield nbytes
    while (nbytes := nbytes // 4) > _SMALL_NBYTES:
        yield nbytes
    yield 0


def foreseen_order(buckets: Sequence[Bucket], profile: Profile, credit: int) -> list[int]:
    """The order in which buckets start if each takes the time that the profile says."""
    return list(_foresee(buckets, profile, credit))


def foreseen_step(buckets: Sequence[Bucket], profile: Profile, credit: int) -> float:
    """Seconds from one step to the next, if all takes the time that the profile says."""
    ends = _foresee(buckets, profile, credit)
    now, number = profile.total_s, 0
    for layer, forward_s in zip(profile.layers, profile.forward_s):
        while number < len(buckets) and buckets[number].start < layer.stop:
            now = max(now, ends[number])
            number += 1
        now += forward_s
    return now - sum(profile.forward_s)


def _foresee(buckets: Sequence[Bucket], profile: Profile, credit: int) -> dict[int, float]:
    """When the mean of each bucket is there, in the order in which they start.

    Whenever there is credit, the first bucket of those whose gradients are there starts.
    """
    ends = profile.backward_ends()
    ready = [profile.total_s * ends[profile.first_layer(bucket)] for bucket in buckets]
    coming = sorted(range(len(buckets)), key=lambda number: (ready[number], number), reverse=True)
    waiting: list[int] = []
    means: dict[int, float] = {}
    running: list[tuple[float, int]] = []  # when it ends, bytes
    used = 0
    now = free_s = 0.0
    while len(means) < len(buckets):
        while coming and ready[coming[-1]] <= now:
            heappush(waiting, coming.pop())
        while running and running[0][0] <= now:
            used -= heappop(running)[1]
        if waiting:
            nbytes = VALUE_NBYTES * buckets[waiting[0]].numel
            if not running or used + nbytes <= credit:
                number = heappop(waiting)
                numel = buckets[number].numel
                free_s = max(free_s, now) + profile.exchange_s(numel)
                means[number] = free_s + profile.delay_s(numel)
                heappush(running, (means[number], nbytes))
                used += nbytes
                continue
        following = [running[0][0]] if running else []
        if coming:
            following.append(ready[coming[-1]])
        now = max(now, min(following))
    return means
