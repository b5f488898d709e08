"""Continues a run with other buckets or another number of workers, keeping all residuals."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.core.codec import State
from gradwire.core.group import Group
from gradwire.core.memory import Memories, Memory, cut, joined, resized
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


async def regroup_here(
    reducer: Reducer,
    states: Sequence[State],
    old: Sequence[Spec],
    new: Sequence[Spec],
    group: Group,
) -> tuple[State, ...]:
    """The states of this rank for the new buckets. All ranks of the group call it.

    The new buckets hold tensors of the old ones, perhaps in another order; a tensor that buckets
    cut apart is cut apart in order. What owners of shards keep is gathered, everything else stays
    on its rank.
    """
    rank, size = group.rank, group.size
    whole = [await _with_whole_shards(state, group) for state in states]
    parts = [reducer.remembered([state], spec) for state, spec in zip(whole, old)]
    of_tensors = {n: v for state in states for n, v in reducer.of_tensors(state).items()}
    memories = joined(parts, old)
    places = _places(old)
    fresh = [[reducer.init(spec, size)] * size for spec in new]
    taken: dict[str, int] = {}  # elements of each tensor that the buckets before have
    restored = []
    for spec, own in zip(new, fresh):
        runs = []
        for name, start, stop, _ in spec.layout:
            first = places[name] + taken.get(name, 0)
            runs.append((first, first + stop - start))
            taken[name] = taken.get(name, 0) + stop - start
        picked = _on_all(_picked(memories, runs), size)
        state = reducer.restored(own, picked, spec)[rank]
        restored.append(reducer.with_tensors(state, of_tensors))
    return tuple(restored)


def _places(specs: Sequence[Spec]) -> dict[str, int]:
    """Where each tensor begins in the vector of all buckets, one after the other."""
    places: dict[str, int] = {}
    before = 0
    for spec in specs:
        for name, start, _, _ in spec.layout:
            places.setdefault(name, before + start)
        before += spec.numel
    return places


def _picked(memories: Memories, runs: Sequence[tuple[int, int]]) -> dict[str, Memory]:
    parts = [cut(memories, start, stop) for start, stop in runs]
    return {
        name: memory._replace(
            vectors=tuple(
                torch.cat([part[name].vectors[i] for part in parts])
                for i in range(len(memory.vectors))
            )
        )
        for name, memory in memories.items()
    }


def _on_all(memories: Memories, size: int) -> dict[str, Memory]:
    """The memories of one rank in the place of those of all: only its own are used."""
    return {
        name: memory if memory.is_shared else memory._replace(vectors=memory.vectors * size)
        for name, memory in memories.items()
    }


async def _with_whole_shards(state: Any, group: Group) -> Any:
    """The state with the residuals of all owners of shards in the place of its own
    (`core/lifted.py`)."""
    if isinstance(state, Mapping):
        owned = state.get("scatter") and state["scatter"].get("owned")
        if owned and owned["residual"] is not None:
            pieces = await group.all_gather(owned["residual"].reshape(-1))
            scatter = {**state["scatter"], "owned": {**owned, "residual": torch.cat(tuple(pieces))}}
            return {**state, "scatter": scatter}
        return {name: await _with_whole_shards(value, group) for name, value in state.items()}
    if isinstance(state, tuple | list):
        return tuple([await _with_whole_shards(value, group) for value in state])
    return state
