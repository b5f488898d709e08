"""Combine-then-adapt with the gradient at the combined point (Chen and Sayed 2012, eq. 11 to 13).

    psi_i = sum_j W_ij x_j,    x_i <- psi_i + u_i      u_i: the walk from psi_i

The distributed subgradient method of Nedic and Ozdaglar 2009 (eq. 3) takes the gradient at x_i and
not at psi_i: that rule is `dpsgd`. Here the gradient waits for the models of the neighbours, and is
not stale in return. If a worker is lost, its neighbours take over its weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class Subgradient(GossipAlgorithm):
    """Average the models, then take a step from there: combine, then adapt."""

    paper = "Chen and Sayed 2012, Diffusion adaptation strategies for distributed optimization"
    examples = ("subgradient",)

    async def before(self, neighbours: Neighbours, replica: Replica, step: int) -> Replica:
        return replica.having(params=await neighbours.weighted(replica.params, step))

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        return replica.having(params=await neighbours.node.call(torch.add, replica.params, walk))
