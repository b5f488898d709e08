"""What neighbours hold of one another where only compressed changes travel.

Each worker keeps "estimate", what all its neighbours hold of its model, and "estimate j", what it
holds of neighbour j. Both change by what was sent, decoded in the same way by everyone, so they
stay equal to the last bit. They begin with the model that all workers start from. (In the papers
they begin with zero, or with that model sent once.)

Copies per neighbour, and not their weighted sum, so that a lost worker's part can be left out.
Messages say which version they are a change of (16 bytes): the life of the sender, and how many
changes there were. Who comes (back) and its neighbours introduce themselves with an uncompressed
vector in their first round together. If a message does not fit what is held, it is left out, and
its sender asked to introduce itself.
"""

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import NeighbourMessage, Neighbours
from gradwire.architecture.gossip._posts import INITIAL
from gradwire.core.protocols import Replica


class EstimatingAlgorithm(GossipAlgorithm):
    """An algorithm whose workers hold estimates of one another's models."""

    compresses = "by rule"

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return _initial(params)

    def memory_of_newcomer(self, params: Tensor, life: float) -> dict[str, Tensor]:
        return _initial(params, life)

    def owed(self, replica: Replica) -> Tensor:
        """What nobody holds of this worker's model: it is lost if the worker is."""
        return replica.params - replica.memory["estimate"]

    async def before(self, neighbours: Neighbours, replica: Replica, step: int) -> Replica:
        life, count = version = _unpack_version(replica.memory["version"])
        if life != INITIAL and not count:  # nobody holds anything of it, and it may have walked
            replica = replica.remembering(estimate=replica.params)
        await neighbours.introduce(replica.memory["estimate"], version, step)
        return replica


def _initial(params: Tensor, life: float = INITIAL) -> dict[str, Tensor]:
    """What is kept, given the model that all, or this worker in this life, start from."""
    return {"estimate": params, "version": _pack_version((life, 0))}


def estimates(neighbours: Neighbours, replica: Replica, step: int) -> list[NeighbourMessage]:
    """What this worker holds of the neighbours that are there, and in which version."""
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


def _apply_change(estimate: Tensor, message: Tensor, old: float, new: float) -> Tensor:
    return estimate * old + message * new
