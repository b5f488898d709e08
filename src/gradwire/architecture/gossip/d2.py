"""D^2: decentralized training over decentralized data (Tang et al. 2018, Alg. 1).

    x_1 = W (x_0 + u_0),    x_{t+1} = W (2 x_t - x_{t-1} + u_t - u_{t-1})

It is kept as x_{t+1} = W (x_t + u_t + c_t) with the correction c_t = x_t - x_{t-1} - u_{t-1},
c_0 = 0, which takes one vector of memory. With a constant step it reaches the optimum however much
the workers' gradients differ, where `dpsgd` stays away from it. It needs lambda_min(W) > -1/3
(assumption 1): a ring of an even number has exactly -1/3, `lazy=True` mends that.

The sum of all c_t is zero. After a loss it is not: the missing term keeps the lost worker's last
gradient in the objective, so the remaining workers end at the optimum that includes it. A worker
that joins begins with c = 0. If the learning rate changes, u_{t-1} in the rule is off by the ratio
of the two rates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.batched import elementwise
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class D2(GossipAlgorithm):
    """Average with a correction for gradients that differ: reaches the common optimum."""

    needs_constant = "d2 corrects by what the same matrix did in the step before"
    needs_symmetric = "d2 converges for symmetric weights"
    paper = "Tang et al. 2018, D2: Decentralized training over decentralized data"
    examples = ("d2",)

    def check(self, matrix: Tensor, what: str) -> None:
        least = float(torch.linalg.eigvalsh(matrix)[0])
        if least < -1 / 3 + 1e-9:
            raise ValueError(
                f"{what}: d2 needs mixing matrices with eigenvalues above -1/3, the smallest is "
                f"{least:.6g}. Take (I + W) / 2 with lazy=True, or gradient_tracking."
            )

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return {"correction": torch.zeros_like(params)}

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        node, x = neighbours.node, replica.params
        message = await node.call(_message, x, walk, replica.memory["correction"])
        new = await neighbours.weighted(message, step)
        correction = await node.call(_correction, new, x, walk)
        return replica.having(params=new).remembering(correction=correction)


@elementwise
def _message(x: Tensor, walk: Tensor, correction: Tensor) -> Tensor:
    return x + walk + correction


@elementwise
def _correction(new: Tensor, x: Tensor, walk: Tensor) -> Tensor:
    return new - x - walk
