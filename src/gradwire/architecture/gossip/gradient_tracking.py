"""Gradient tracking (DIGing, Nedic, Olshevsky and Shi 2017, eq. 2; Pu and Nedic 2021).

    y_t = W y_{t-1} + u_t - u_{t-1},    x_{t+1} = W x_t + y_t,    y_{-1} = u_{-1} = 0

y_i follows the mean walk of all workers: their sums are equal in every step. Both x and y travel in
one message of twice the size, before the gradient is computed, as in `dpsgd`. (Their y is ours
divided by -lr; the steps are combine-then-adapt.) With a constant and small step it reaches the
optimum, also on directed and varying graphs with doubly stochastic weights.

After a loss the sums are no longer equal: the difference keeps the lost worker's last gradient. A
worker that joins begins with y = u.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class GradientTracking(GossipAlgorithm):
    """Average models and steps: each worker follows the mean step of all."""

    paper = (
        "Nedic, Olshevsky and Shi 2017, Achieving geometric convergence for distributed "
        "optimization over time-varying graphs"
    )
    examples = ("gradient_tracking",)

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        zero = torch.zeros_like(params)
        return {"tracked": zero, "walk": zero}

    async def before(self, neighbours: Neighbours, replica: Replica, step: int) -> Replica:
        await neighbours.send(await self._message(neighbours, replica), step)
        return replica

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        message = await self._message(neighbours, replica)
        both = await neighbours.combined(message, await neighbours.receive(step))
        x, tracked = await neighbours.node.call(_update_pair, both, walk, replica.memory["walk"])
        return replica.having(params=x).remembering(tracked=tracked, walk=walk)

    async def _message(self, neighbours: Neighbours, replica: Replica) -> Tensor:
        both = (replica.params, replica.memory["tracked"])
        return await neighbours.node.call(torch.cat, both)


def _update_pair(both: Tensor, walk: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    x, tracked = both.chunk(2)
    tracked = tracked + walk - last
    return x + tracked, tracked
