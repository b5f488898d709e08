"""DCD-PSGD, difference compression (Tang et al. 2018, Communication compression, Alg. 1).

    x_i^half = sum_j W_ij x_j + u_i        u_i: the walk from x_i, -lr * grad F_i(x_i) for SGD
    z_i = x_i^half - x_i,    x_i <- x_i + C(z_i)

C(z_i) is sent, so every neighbour knows x_i exactly; the codec's error is an error of the model
itself. The codec must be unbiased and good enough for the graph (thm. 1: a bound on the signal to
noise ratio): for coarser ones take `choco`. The average is kept in expectation.

A worker takes over the weight of a lost neighbour; when a neighbour joins, both sides send their
model once (see _estimates.py).
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.architecture.gossip._estimates import EstimatingAlgorithm, estimates, exchange_changes
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.batched import elementwise
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class DCD(EstimatingAlgorithm):
    """Send the compressed change of the model, and make only that change."""

    needs_codec = "unbiased"
    needs_constant = "dcd adds up the changes of its neighbours, so they must be the same"
    needs_symmetric = "dcd converges for symmetric weights"
    paper = "Tang et al. 2018, Communication compression for decentralized training"
    examples = ("dcd",)

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        x = replica.params
        average = await neighbours.combined(x, estimates(neighbours, replica, step))
        change = await neighbours.node.call(_change, average, walk, x)
        replica, _ = await exchange_changes(neighbours, replica, change, step)
        return replica.having(params=replica.memory["estimate"])


@elementwise
def _change(average: Tensor, walk: Tensor, x: Tensor) -> Tensor:
    return average + walk - x
