"""Continues a run with other buckets or another number of workers, keeping all residuals."""

from collections.abc import Sequence

from gradwire.core.codec import State
from gradwire.core.memory import cut, joined, resized
from gradwire.core.protocols import Replica
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.training.plan import Plan


def regroup(replicas: Sequence[Replica], old: Plan, new: Plan) -> list[Replica]:
    """Converts the replicas of a run from the old plan to the new one.

    Both train the same model through the same compression. New workers get the model of rank 0; the
    residuals of workers that leave are handed over.
    """
    if repr(old.reducer) != repr(new.reducer):  # epochs may have other lengths
        raise ValueError(
            f"regroup moves the memory of one compression, got {old.reducer!r} before and "
            f"{new.reducer!r} after. Start that run anew from the model."
        )
    dtype = replicas[0].params.dtype
    before, after = ([p.spec(unit.bucket, dtype) for unit in p.units()] for p in (old, new))
    held = [replica.exchange for replica in replicas]
    states = regroup_states(old.reducer, held, before, after, new.num_workers)
    return [
        replicas[rank if rank < len(replicas) else 0].having(exchange=exchange)
        for rank, exchange in enumerate(states)
    ]


def regroup_states(
    reducer: Reducer,
    states: Sequence[Sequence[State]],
    old: Sequence[Spec],
    new: Sequence[Spec],
    size: int,
) -> list[tuple[State, ...]]:
    """[rank][bucket]: the states of `size` workers and the new buckets, from those of the old ones.

    Both lists of buckets cover the same flat vector in order.
    """
    if sum(spec.numel for spec in old) != sum(spec.numel for spec in new):
        raise ValueError(
            f"the old buckets hold {sum(spec.numel for spec in old)} elements, the new ones "
            f"{sum(spec.numel for spec in new)}: they are of different models"
        )
    parts = [reducer.remembered([own[i] for own in states], s) for i, s in enumerate(old)]
    whole = resized(joined(parts, old), len(states), size)
    buckets, start = [], 0
    for spec in new:
        fresh = [reducer.init(spec, size) for _ in range(size)]
        own = cut(whole, start, start + spec.numel)
        buckets.append(reducer.restored(fresh, own, spec))
        start += spec.numel
    return list(zip(*buckets))
