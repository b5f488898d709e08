"""Estimates of the neighbours' models, for algorithms that send compressed changes only.

Each worker keeps "estimate", the estimate of its model that all its neighbours hold, and "estimate
j", its estimate of neighbour j. Both are updated by the same decoded messages, so they stay equal
to the last bit. They begin with the model that all workers start from. (In the papers they begin
with zero, or with that model sent once.)

A worker keeps one copy per neighbour, not their weighted sum, so that a lost worker can be left
out. A message names the version that it changes (16 bytes): the incarnation of the sender and the
number of its changes. In the first round after a join, the joined worker and its neighbours send
each other an introduction: an uncompressed vector. A message that does not match the version held
is ignored, and its sender is asked for an introduction.
"""

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import NeighbourMessage, Neighbours
from gradwire.architecture.gossip._posts import INITIAL
from gradwire.core.batched import elementwise
from gradwire.core.protocols import Replica


class EstimatingAlgorithm(GossipAlgorithm):
    """An algorithm whose workers hold estimates of one another's models."""

    compresses = "by rule"

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return _initial(params)

    def memory_of_newcomer(self, params: Tensor, life: float) -> dict[str, Tensor]:
        return _initial(params, life)

    def owed(self, replica: Replica) -> Tensor:
        """The part of this worker's model that no neighbour holds; it is lost with the worker."""
        return replica.params - replica.memory["estimate"]

    async def before(self, neighbours: Neighbours, replica: Replica, step: int) -> Replica:
        life, count = version = _unpack_version(replica.memory["version"])
        if (
            life != INITIAL and not count
        ):  # no neighbour holds an estimate of it, and it may have changed
            replica = replica.remembering(estimate=replica.params)
        await neighbours.introduce(replica.memory["estimate"], version, step)
        return replica


def _initial(params: Tensor, life: float = INITIAL) -> dict[str, Tensor]:
    """The initial memory, given the model that all workers, or this incarnation, start from."""
    return {"estimate": params, "version": _pack_version((life, 0))}


def estimates(neighbours: Neighbours, replica: Replica, step: int) -> list[NeighbourMessage]:
    """This worker's estimates of the neighbours that are present, with their versions."""
    found, memory = [], replica.memory
    is_first = _unpack_version(memory["version"]) == (
        INITIAL,
        0,
    )  # "estimate" is what all start from
    for rank, weight in neighbours.sources(step).items():
        if f"estimate {rank}" in memory:
            version = _unpack_version(memory[f"version {rank}"])
            found.append(
                NeighbourMessage(rank, weight, memory[f"estimate {rank}"], version=version)
            )
        elif is_first:
            found.append(NeighbourMessage(rank, weight, memory["estimate"], version=(INITIAL, 0)))
    return found


async def exchange_changes(
    neighbours: Neighbours,
    replica: Replica,
    message: Tensor,
    step: int,
    old: float = 1.0,
    new: float = 1.0,
) -> tuple[Replica, list[NeighbourMessage]]:
    """Sends a message through the codec: estimates become old * estimate + new * C(message).

    Returns the new estimates of the neighbours, and the replica with all of them in its memory.
    """
    node, memory = neighbours.node, replica.memory
    known = {one.rank: one for one in estimates(neighbours, replica, step)}
    version = _unpack_version(memory["version"])
    buffer, exchange = await neighbours.encoded(message, replica.exchange, step)
    await neighbours.send(buffer, step, version=version)
    own = await neighbours.decode(neighbours.rank, buffer, replica, step)
    entries = {
        "estimate": await node.share(_apply_change, memory["estimate"], own, old, new),
        "version": _pack_version(_next_version(version)),
    }
    received = []
    for one in await neighbours.receive(step):
        held = known.get(one.rank)
        if one.rank in neighbours.introduced:
            its_version, x = neighbours.introduced.pop(one.rank)
            held = NeighbourMessage(one.rank, one.weight, x, version=its_version)
        if held is None or held.version != one.version:
            await neighbours.request_introduction(one.rank)
            continue
        assert one.version is not None
        change = await neighbours.decode(one.rank, one.x, replica, step)
        estimate = await node.share(_apply_change, held.x, change, old, new)
        entries[f"estimate {one.rank}"] = estimate
        entries[f"version {one.rank}"] = _pack_version(_next_version(one.version))
        received.append(held._replace(x=estimate))
    return replica.having(exchange=exchange).remembering(**entries), received


def _next_version(version: tuple[float, int]) -> tuple[float, int]:
    return version[0], version[1] + 1


def _pack_version(version: tuple[float, int]) -> Tensor:
    return torch.tensor(version, dtype=torch.float64)


def _unpack_version(stamp: Tensor) -> tuple[float, int]:
    life, count = stamp.tolist()
    return life, int(count)


@elementwise
def _apply_change(estimate: Tensor, message: Tensor, old: float, new: float) -> Tensor:
    return estimate * old + message * new
