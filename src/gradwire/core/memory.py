"""The memory of reducers per element, and how it is kept when buckets or workers change.

The state of a reducer is a tree that only the reducer knows. The vectors in it that have an entry
for every element of a bucket (residuals, estimates, velocities) must be kept when buckets are cut
differently or workers join and leave. A reducer names them with a `Role`, and `training/regroup.py`
moves them. Everything else (factors to start from, hints, a codec's counters) is initialized again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.group import mean_in_order
from gradwire.core.spec import Spec


class Role(Enum):
    """How a vector changes with the number of workers."""

    LEFT = "what is still to be sent: the sum over all workers stays"
    OWN = "a running value of one worker: it goes with it, and is zero for a new one"
    COMMON = "equal on all ranks: a new one gets it too"
    SERVER = "what the owners of shards still owe to the mean: each holds a part of one vector"


@dataclass(frozen=True, slots=True)
class MeanOf:
    """The role of a vector that is on every rank, and is the mean of all ranks' `name`."""

    name: str


Roles = Mapping[str, Role | MeanOf]  # of the entries of a state


class Memory(NamedTuple):
    """One vector of every rank, or a single one that all ranks share. [numel] each."""

    role: Role | MeanOf
    vectors: tuple[Tensor, ...]

    @property
    def is_shared(self) -> bool:
        return self.role not in (Role.LEFT, Role.OWN)

    def of(self, rank: int) -> Tensor:
        return self.vectors[0] if self.is_shared else self.vectors[rank]


Memories = Mapping[str, Memory]


def named_vectors(
    roles: Roles, states: Sequence[Mapping[str, Any]], spec: Spec
) -> dict[str, Memory]:
    """The memories of these names in the states of all ranks; None is zero."""
    found = {}
    for name, role in roles.items():
        ranks = states[:1] if isinstance(role, MeanOf) or role is Role.COMMON else states
        vectors = [state[name] for state in ranks]
        if all(vector is None for vector in vectors):
            continue
        known = next(vector for vector in vectors if vector is not None)
        zero = torch.zeros(spec.numel, dtype=known.dtype, device=known.device)
        found[name] = Memory(role, tuple(zero if v is None else v.reshape(-1) for v in vectors))
    return found


def joined(parts: Sequence[Memories], specs: Sequence[Spec]) -> dict[str, Memory]:
    """The memories of several buckets as those of one; a bucket without one of them has zeros."""
    whole = {}
    for name, known in {n: m for part in parts for n, m in part.items()}.items():
        zeros = [known.vectors[0].new_zeros(spec.numel) for spec in specs]
        ranks = range(len(known.vectors))
        whole[name] = replaced(
            known,
            tuple(
                torch.cat([p[name].vectors[rank] if name in p else z for p, z in zip(parts, zeros)])
                for rank in ranks
            ),
        )
    return whole


def inside(prefix: str, memories: Memories) -> dict[str, Memory]:
    """The memories whose names begin with `prefix.`, without it."""
    start = f"{prefix}."
    return {n.removeprefix(start): m for n, m in memories.items() if n.startswith(start)}


def cut(memories: Memories, start: int, stop: int) -> dict[str, Memory]:
    """What of the memories lies in elements start .. stop - 1."""
    return {
        name: replaced(memory, tuple(vector[start:stop] for vector in memory.vectors))
        for name, memory in memories.items()
    }


def resized(memories: Memories, old: int, size: int) -> dict[str, Memory]:
    """The memories of `old` workers, for `size`: those with a number too high leave."""
    result = {}
    for name, (role, vectors) in memories.items():
        zero = torch.zeros_like(vectors[0])
        if role is Role.LEFT:  # a worker that leaves hands over what it owes
            kept = [vectors[rank] if rank < old else zero for rank in range(size)]
            for rank in range(size, old):
                kept[rank % size] = kept[rank % size] + vectors[rank]
            vectors = tuple(kept)
        elif role is Role.OWN:
            vectors = tuple(vectors[rank] if rank < old else zero for rank in range(size))
        elif role is Role.SERVER:  # counts for a mean: its share of the sum is `size` times that
            vectors = (vectors[0] * (old / size),)
        result[name] = Memory(role, vectors)
    for name, memory in result.items():
        if isinstance(memory.role, MeanOf) and memory.role.name in result:
            mean = mean_in_order(result[memory.role.name].vectors, size)
            result[name] = replaced(memory, (mean,))
    return result


def replaced(memory: Memory, vectors: tuple[Tensor, ...]) -> Memory:
    return memory._replace(vectors=vectors)
