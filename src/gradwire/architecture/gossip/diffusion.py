"""Diffusion, adapt-then-combine (Chen and Sayed 2012, eq. 8 to 10, with C = I).

    x_i <- sum_j W_ij (x_j + u_j)      u_j: the walk from x_j, -lr * grad F_j(x_j) for SGD

The step is averaged with the model, so workers end nearer to one
another, and to the optimum, than with combine-then-adapt (Tu and Sayed 2012); in return nothing
travels while gradients are computed. If a worker is lost, its neighbours take over its weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class Diffusion(GossipAlgorithm):
    """Take the step, then average the models: adapt, then combine."""

    paper = "Chen and Sayed 2012, Diffusion adaptation strategies for distributed optimization"
    examples = ("diffusion",)

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        x = await neighbours.node.call(torch.add, replica.params, walk)
        return replica.having(params=await neighbours.weighted(x, step))
