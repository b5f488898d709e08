"""Asynchronous decentralized parallel SGD (Lian et al. 2018, Alg. 1).

Worker i reads its model, computes a gradient there, averages with one neighbour j,
x_i, x_j <- (x_i + x_j) / 2, and applies the gradient to its current model. The gradient may be
stale, since others average with the model meanwhile. No worker waits for a round.

The paper locks both models while they are averaged, and avoids deadlock by bipartite graphs. Here a
responder beside the training answers a request that carries x_i with its own x_j and moves x_j by
(x_i - x_j) / 2; the requester moves its model, as it is when the answer comes, by (x_j - x_i) / 2
with the x_i it sent. The two moves are opposite to the last bit, so averaging never changes the sum
of all models and messages in flight, on any graph and without locks. The request travels while the
gradient is computed. j is drawn with the weights W_ij, j != i. If two workers ask each other at
once, they would swap their models: only the request of the lower rank counts, and it answers the
other without a model.

Responders continue after the last step of their worker, until the run ends; the model of a replica
is the one after its own last step, `GossipMixing.params` the one at the end. If the asked neighbour
is lost, the step completes without it.

The staleness of a gradient is how often the model was moved between the reading and the applying,
by averages that others asked for and the one that the worker asked for itself: "staleness_sum",
"staleness_max" and "staleness_count" (of gradients) in the memory of a replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.architecture.gossip._posts import (
    ANSWER,
    HEADER_NBYTES,
    LABEL,
    NUMBER_NBYTES,
    REQUEST,
    ModelAnswer,
    ModelRequest,
    NewIncarnation,
)
from gradwire.core.batched import elementwise
from gradwire.core.errors import PeerLost
from gradwire.core.node import Framed
from gradwire.core.protocols import Counts, Replica, Worker

_NBYTES = HEADER_NBYTES + NUMBER_NBYTES
_STALENESS = ("staleness_sum", "staleness_max", "staleness_count")


@dataclass(frozen=True, repr=False)
class ADPSGD(GossipAlgorithm):
    """Average with one neighbour at a time, whenever a gradient is done."""

    asynchronous = True
    needs_constant = "adpsgd has no steps that all workers take together"
    needs_symmetric = "adpsgd averages in both directions at once"
    paper = "Lian et al. 2018, Asynchronous decentralized parallel stochastic gradient descent"
    examples = ("adpsgd",)

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(_STALENESS, torch.tensor(0))

    def counts(self, memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Counts]:
        sums, maxima, counts = zip(
            *((int(memory[name]) for name in _STALENESS) for memory in memories)
        )
        return {"staleness": Counts(sum(sums), max(1, sum(counts)), max(maxima))}

    async def step(
        self, neighbours: Neighbours, worker: Worker, replica: Replica, step: int
    ) -> Replica:
        node = neighbours.node
        read = await self._current(neighbours, replica, step)
        replica, num_moves = replica.having(params=read), neighbours.num_moves
        partner = _draw_partner(neighbours, await node.members(), step)
        if partner is not None:
            life = neighbours.presence.life_of(partner)
            request = Framed(ModelRequest(step, life), read)
            neighbours.asked = partner
            await node.send_framed(partner, REQUEST, request, _NBYTES, LABEL)
        gradient, replica = await worker.gradient(replica, step)
        if gradient is not None:
            replica = await worker.update(replica, gradient, step, shared=False)
        if partner is not None:
            other = await self._answer(neighbours, partner, life, step)
            neighbours.asked = None
            if other is not None:
                _move(neighbours, await node.call(_half_difference, read, other))
        if gradient is not None:
            walk = await node.call(torch.sub, replica.params, read)
            replica = _with_staleness(replica, neighbours.num_moves - num_moves)
            _move(neighbours, walk)
        return replica.having(params=_model(neighbours))

    async def rejoin(self, neighbours: Neighbours, replica: Replica) -> tuple[Replica, int]:
        replica, first = await super().rejoin(neighbours, replica)
        await neighbours.node.spawn(self._respond(neighbours))
        return replica, first

    async def _current(self, neighbours: Neighbours, replica: Replica, step: int) -> Tensor:
        """The model as it is now; others may have changed it since the last step."""
        if neighbours.presence.model is None:
            await neighbours.presence.attend(replica.params, step)
            await neighbours.node.spawn(self._respond(neighbours))
        model = _model(neighbours)
        neighbours.presence.next = step + 1
        return model

    async def _respond(self, neighbours: Neighbours) -> None:
        node = neighbours.node
        while True:
            rank, message = await node.recv_any(REQUEST)
            header = ModelAnswer(message.header.step, neighbours.presence.life)
            both_asked = neighbours.asked == rank and neighbours.rank < rank
            # It may have been meant for an earlier incarnation of this worker, and abandoned since.
            if both_asked or message.header.life != neighbours.presence.life:
                await node.send_framed(rank, ANSWER, Framed(header), _NBYTES, LABEL)
                continue
            neighbours.check(rank, message.data)
            own = _model(neighbours)
            await node.send_framed(rank, ANSWER, Framed(header, own), _NBYTES, LABEL)
            _move(neighbours, await node.call(_half_difference, own, message.data))

    async def _answer(
        self, neighbours: Neighbours, partner: int, life: float, step: int
    ) -> Tensor | None:
        """The partner's model; None if it answers with nothing or was lost, even if it is back."""
        while True:
            try:
                message = await neighbours.node.recv(partner, ANSWER)
            except PeerLost:
                return None
            assert isinstance(message, Framed)
            if isinstance(message.header, NewIncarnation):
                if neighbours.presence.life_of(partner) != life:
                    return None
            else:
                neighbours.presence.record_incarnation(partner, message.header.life)
                if message.header.step == step:
                    if message.data is not None:
                        neighbours.check(partner, message.data)
                    return message.data


def _draw_partner(neighbours: Neighbours, members: frozenset[int], step: int) -> int | None:
    """The neighbour to average with; None if none is present."""
    weights = {rank: w for rank, w in neighbours.sources(step).items() if rank in members}
    if not weights:
        return None
    cumulated = torch.tensor(list(weights.values()), dtype=torch.float64).cumsum(0)
    key = neighbours.key.at(step).private(neighbours.rank).child("partner")
    place = torch.searchsorted(cumulated, key.uniform64(1) * cumulated[-1], right=True)
    return list(weights)[min(int(place), len(weights) - 1)]


def _model(neighbours: Neighbours) -> Tensor:
    assert neighbours.presence.model is not None
    return neighbours.presence.model


def _move(neighbours: Neighbours, change: Tensor) -> None:
    """Adds to the model as it is; no other program of this node runs in between."""
    neighbours.presence.model = _model(neighbours) + change
    neighbours.num_moves += 1


def _with_staleness(replica: Replica, staleness: int) -> Replica:
    """The replica after one more gradient of this staleness."""
    total, most, count = (int(replica.memory[name]) for name in _STALENESS)
    noted = (total + staleness, max(most, staleness), count + 1)
    return replica.remembering(**dict(zip(_STALENESS, map(torch.tensor, noted))))


@elementwise
def _half_difference(x: Tensor, other: Tensor) -> Tensor:
    return (other - x) / 2
