"""Lazily aggregated gradients, LAG-WK (Chen et al. 2018, "LAG: Lazily aggregated gradient for
communication-efficient distributed learning", eq. 15a).

Worker i sends nothing, and its last gradient is used again, as long as

    |G_i(x_t) - g_i|^2 <= 1/(alpha^2 n^2) sum_{d=1..D} xi |x_{t+1-d} - x_{t-d}|^2

where alpha is the rate for the sum of all gradients. We step along their mean, so alpha n is lr:

    lr^2 |G_i(x_t) - g_i|^2 <= sum_{d=1..D} xi |x_{t+1-d} - x_{t-d}|^2.

The paper takes D = 10 and xi = 0.1; xi = 0 is bsp. In the first step every worker sends.

Where we differ: moves are those of plain SGD, lr * (1/n) sum_i g_i, also where the optimizer is
another: on digits, moves with momentum 0.9, ten times as long, kept all workers from sending until
training diverged. (With momentum xi = 0.01 is safer.) All workers hold the mean of the g_i, so no
server is needed. The change is relative to the gradient last decoded, so codecs may be lossy (`laq`
has a rule that includes their error).

Use it with full gradients or large batches of different data: workers with smooth losses send
rarely. With small mini-batches two gradients differ by noise, and every worker sends in every step.
With many workers take parameter_server: otherwise each payload is gathered by all n - 1 others.

3PC's rule (Richtarik et al. 2022) compares with the last change of the gradient in place of moves
of the model. It needs nothing of the model and is a compression: write synchronization="bsp",
compression="threepc(topk(0.1), zeta=1.0)".
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.core.protocols import Replica, Worker
from gradwire.synchronization._lazy import Lazy, squared_norm


@dataclass(frozen=True, repr=False)
class LAG(Lazy):
    """Send a gradient only if it changed; for 3PC: compression="threepc(topk(0.1), zeta=1.0)"."""

    examples = ("lag(0.1)", "lag(0.1, window=20)")
    known_as = ("threepc", "clag")
    paper = (
        "Chen et al. 2018, LAG: Lazily aggregated gradient for communication-efficient "
        "distributed learning"
    )

    async def change_size(
        self, worker: Worker, replica: Replica, change: Tensor, step: int
    ) -> tuple[float, dict[str, Tensor]]:
        return await worker.node.call(squared_norm, change), {}
