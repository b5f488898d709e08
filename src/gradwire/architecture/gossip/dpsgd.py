"""Decentralized parallel SGD (Lian et al. 2017, Alg. 1).

    x_i <- sum_j W_ij x_j + u_i        u_i: the walk from x_i, -lr * grad F_i(x_i) for SGD

Every worker sends its model before it computes the gradient and averages after it, so that models
travel while gradients are computed. Combine-then-adapt with the gradient at the point before
(Nedic and Ozdaglar 2009 have the same rule); `subgradient` takes it at the combined point,
`diffusion` combines after the step.

With a constant step it stops at a distance from the optimum of the order of the step, times how
much the workers' gradients differ; `d2` and `gradient_tracking` do not. If a worker is lost, its
neighbours take over its weight.

With a lossy codec it sends C(x_j): every round adds a compression error, so workers never agree;
use `choco` instead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class DPSGD(GossipAlgorithm):
    """Average the models while the gradients are computed, then add the steps."""

    compresses = "naively"
    paper = "Lian et al. 2017, Can decentralized algorithms outperform centralized algorithms?"
    examples = ("dpsgd",)

    async def before(self, neighbours: Neighbours, replica: Replica, step: int) -> Replica:
        return await self._send(neighbours, replica, step)

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        received = await neighbours.receive(step)
        if not neighbours.is_exact(replica, step):
            received = await neighbours.decoded(received, replica, step)
        combined = await neighbours.combined(replica.params, received)
        return replica.having(params=await neighbours.node.call(torch.add, combined, walk))

    async def _send(self, neighbours: Neighbours, replica: Replica, step: int) -> Replica:
        message = replica.params
        if not neighbours.is_exact(replica, step):
            message, exchange = await neighbours.encoded(message, replica.exchange, step)
            replica = replica.having(exchange=exchange)
        await neighbours.send(message, step)
        return replica
