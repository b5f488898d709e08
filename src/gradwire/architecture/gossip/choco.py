"""CHOCO-SGD (Koloskova et al. 2019, Alg. 2): compressed gossip that reaches the exact average.

    x_i^half = x_i + u_i                           u_i: the walk, -lr * grad F_i(x_i) for SGD
    q_i = C(x_i^half - xhat_i)                     sent to the neighbours
    xhat_j <- xhat_j + q_j                         for j = i and all neighbours
    x_i <- x_i^half + gamma * sum_j W_ij (xhat_j - xhat_i)

xhat_j is the estimate of x_j that j and its neighbours hold. What a round loses stays in x - xhat
and is sent later, so any contraction converges, and the average of the x_i is preserved exactly in
every step. gamma is the consensus step: with delta of the codec and the gap rho of the graph,
theory asks for about rho^2 delta (thm. 2), practice allows more. With gamma = 1 and no compression
it is `diffusion`.

xhat begins with the common model (with zero in the paper). A lost neighbour's term is left out;
when a neighbour joins, both sides send xhat once (see _estimates.py).
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.architecture.gossip._estimates import EstimatingAlgorithm, exchange_changes
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.batched import elementwise
from gradwire.core.protocols import Replica


@dataclass(frozen=True, repr=False)
class Choco(EstimatingAlgorithm):
    """Send compressed changes, average the estimates: exact in the limit."""

    gamma: float

    needs_codec = "contraction"
    needs_constant = "choco adds up the changes of its neighbours, so they must be the same"
    needs_symmetric = "choco converges for symmetric weights"
    paper = (
        "Koloskova et al. 2019, Decentralized stochastic optimization and gossip algorithms with "
        "compressed communication"
    )
    examples = ("choco(0.3)",)

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(f"choco: gamma must lie in (0, 1], got {self.gamma}")

    async def after(
        self, neighbours: Neighbours, replica: Replica, walk: Tensor, step: int
    ) -> Replica:
        node = neighbours.node
        half, change = await node.call(
            _local_step, replica.params, walk, replica.memory["estimate"]
        )
        replica, received = await exchange_changes(neighbours, replica, change, step)
        own = replica.memory["estimate"]
        average = await neighbours.combined(own, received)
        return replica.having(
            params=await node.call(_move_to_average, half, average, own, self.gamma)
        )


@elementwise
def _local_step(x: Tensor, walk: Tensor, estimate: Tensor) -> tuple[Tensor, Tensor]:
    half = x + walk
    return half, half - estimate


@elementwise
def _move_to_average(half: Tensor, average: Tensor, own: Tensor, gamma: float) -> Tensor:
    return half + (average - own) * gamma
