"""ECD-PSGD, extrapolation compression (Tang et al. 2018, Communication compression, Alg. 2).

    x_i' = sum_j W_ij y_j + u_i                     u_i: the walk from x_i; t = 1, 2, ...
    z_i = (1 - t/2) x_i + t/2 x_i'                  C(z_i) is sent
    y_j <- (1 - 2/t) y_j + 2/t C(z_j)               for j = i and all neighbours

y_j is the estimate of x_j that j and its neighbours hold. With an unbiased codec E y_j = x_j, and
its variance falls with t if the codec's error is bounded, as that of rounding to a fixed grid is
(assumption 2 of the paper). z grows with t: relative errors, as of qsgd, grow with it; models that
still move much are better served by `dcd` and `choco`. The average is kept in expectation.

t is one plus the number of the step in which the round begins. A worker takes over the weight of a
lost neighbour; when a neighbour joins, both sides send y once (see _estimates.py).
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.architecture.gossip._estimates import EstimatingAlgorithm, estimates, exchange_changes
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.batched import elementwise
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class ECD(EstimatingAlgorithm):
    """Send a compressed extrapolation of the model, from which others estimate it."""

    needs_codec = "unbiased"
    needs_constant = "ecd adds up the changes of its neighbours, so they must be the same"
    needs_symmetric = "ecd converges for symmetric weights"
    paper = "Tang et al. 2018, Communication compression for decentralized training"
    examples = ("ecd",)

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        t = step + 1
        own = replica.memory["estimate"]
        average = await neighbours.combined(own, estimates(neighbours, replica, step))
        x, ahead = await neighbours.node.call(_extrapolate, replica.params, average, walk, t)
        replica, _ = await exchange_changes(neighbours, replica, ahead, step, 1 - 2 / t, 2 / t)
        return replica.having(params=x)


@elementwise
def _extrapolate(x: Tensor, average: Tensor, walk: Tensor, t: int) -> tuple[Tensor, Tensor]:
    new = average + walk
    return new, x * (1 - t / 2) + new * (t / 2)
