"""What overlapping schedules share."""

import itertools
from collections.abc import Iterable, Sequence

from gradwire.core.protocols import Backward, Bucket, Reduce

VALUE_NBYTES = 4  # sizes of buckets are given for float32, as DDP's are


async def exchange_when_ready(
    backward: Backward, buckets: Sequence[Bucket], reduce: Reduce
) -> None:
    """Starts the exchange of each bucket as soon as its gradient is there, last layers first.

    The order is that of the model, on all ranks, whatever order gradients come in.
    """
    node, tasks = backward.node, []
    for bucket in reversed(buckets):
        x = await backward.ready(bucket)
        tasks.append(await node.spawn(reduce(bucket, x)))
    for task in tasks:
        await node.join(task)


def merge(tensors: Iterable[Bucket]) -> Bucket:
    """Neighbouring tensors as one bucket, named by its first and last."""
    first, *others = tensors
    if not others:
        return first
    return Bucket(f"{first.name}..{others[-1].name}", first.start, others[-1].stop)


def fuse(tensors: Sequence[Bucket], nbytes: int, first: int) -> list[Bucket]:
    """Neighbouring tensors merged up to a size, from the last one on; `first` is that bucket's."""
    merged: list[list[Bucket]] = []
    for tensor in reversed(tensors):
        limit = first if len(merged) <= 1 else nbytes
        own = sum(one.numel for one in merged[-1]) if merged else 0
        if merged and VALUE_NBYTES * (own + tensor.numel) <= limit:
            merged[-1].insert(0, tensor)
        else:
            merged.append([tensor])
    return [merge(group) for group in reversed(merged)]


def cut(tensor: Bucket, nbytes: int) -> list[Bucket]:
    """A tensor in pieces of at most so many bytes, of almost equal length."""
    most = max(1, nbytes // VALUE_NBYTES)
    num_pieces = -(-tensor.numel // most)
    if num_pieces <= 1:
        return [tensor]
    bounds = [tensor.start + tensor.numel * i // num_pieces for i in range(num_pieces + 1)]
    return [
        Bucket(f"{tensor.name}[{i}]", start, stop)
        for i, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]


def check_nbytes(schedule: object, name: str, nbytes: int) -> None:
    if nbytes < VALUE_NBYTES:
        raise ValueError(
            f"{schedule!r}: {name} is a number of bytes, at least {VALUE_NBYTES}, got {nbytes}"
        )
