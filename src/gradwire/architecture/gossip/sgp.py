"""Stochastic gradient push (Assran et al. 2019, Alg. 1): SGD with push-sum, for directed graphs.

    x_i <- sum_j P_ij (x_j + u_j),    w_i <- sum_j P_ij w_j,    z_i = x_i / w_i

The columns of P sum to one: every worker distributes all it has. Rows need not, so a worker need
not know its senders. x_i alone would tend to a multiple of the average that differs between
workers; w_i, which begins with 1 and travels with x_i (8 bytes), is that multiple. Training sees
z_i; u_i is the walk from z_i, added to x_i. The sums of x (but for walks) and of w never change.

If a worker is lost, what was on the way to it and what it held are lost with their weights, and
those that are left still agree, on the average of what they have. The sum of their weights is then
less than their number, and walks count for more in the same proportion: a higher learning rate. A
worker that joins begins with a neighbour's z and weight 1.

On graphs whose rows sum to one as well (all but those of `from_file`) weights stay 1 while
no worker is lost, and this is `diffusion`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.batched import elementwise
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class SGP(GossipAlgorithm):
    """Push-sum: give shares of model and weight away; works on directed graphs."""

    pushes = True
    paper = "Assran et al. 2019, Stochastic gradient push for distributed deep learning"
    examples = ("sgp",)

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        weight = torch.ones((), dtype=torch.float64, device=params.device)
        return {"pushed": params, "push_weight": weight}

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        node, memory = neighbours.node, replica.memory
        pushed, weight = memory["pushed"], float(memory["push_weight"])
        if neighbours.presence.is_new:  # it may have taken steps before its first round
            pushed = replica.params
        own = await node.call(torch.add, pushed, walk)
        given = await neighbours.send(own, step, weight)
        received = await neighbours.receive(step)
        shares = [one.weight * (one.push_weight or 0.0) for one in received]
        weight = (1 - given) * weight + sum(shares)
        weights = tuple(one.weight for one in received)
        pushed, seen = await node.call(
            _push_sum, own, 1 - given, tuple(one.x for one in received), weights, weight
        )
        push_weight = torch.full_like(memory["push_weight"], weight)
        return replica.having(params=seen).remembering(pushed=pushed, push_weight=push_weight)


@elementwise
def _push_sum(
    own: Tensor, kept: float, others: Sequence[Tensor], weights: Sequence[float], weight: float
) -> tuple[Tensor, Tensor]:
    total = own * kept
    for other, share in zip(others, weights):
        total.add_(other, alpha=share)
    return total, total / weight
