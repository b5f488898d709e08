"""Lazily aggregated quantised gradients, LAQ (Sun et al. 2019, "Communication-efficient distributed
learning via lazily aggregated quantized gradients", eq. 7).

Workers send quantised changes of their gradients, C(G_i(x_t) - g_i). They send nothing as long as

    |C(G_i(x_t) - g_i)|^2 <= 1/(alpha^2 n^2) sum_{d=1..D} xi |x_{t+1-d} - x_{t-d}|^2
                             + 3 (|e_t|^2 + |e_last|^2)

and they sent within the last `patience` steps. e_t is the quantisation error, G_i(x_t) - g_i -
C(G_i(x_t) - g_i), and e_last that of the last change which worker i sent. As in `lag`, alpha n is
lr, and moves are those of plain SGD. The paper takes D = 10, xi = 0.08 and a patience of 100.

Where we differ: C is the compression, any codec (the paper's rounds to levels over the range of the
change; qsgd is of that kind). The rule is meant for errors that are small against the change: with
topk(0.01) hardly any worker would send before patience ends; take `lag`, whose rule uses the whole
change. To decide, a worker encodes its change in every step, even if it then sends nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.protocols import Replica, Worker
from gradwire.synchronization._lazy import Lazy, squared_norm


@dataclass(frozen=True, repr=False)
class LAQ(Lazy):
    """Send a quantised change of the gradient only if it is large, also against its error."""

    patience: int = 100  # steps without sending after which a worker must send

    examples = ("laq(0.08)", "laq(0.08, patience=20)")
    paper = (
        "Sun et al. 2019, Communication-efficient distributed learning via lazily aggregated "
        "quantized gradients"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience < 1:
            raise ValueError(f"laq: patience is a number of steps from 1 on, got {self.patience}")

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return {
            **super().memory(params),
            "missed": torch.zeros((), dtype=torch.float64),  # |e_last|^2
            "num_silent": torch.zeros((), dtype=torch.int64),  # steps since it last sent
        }

    async def change_size(
        self, worker: Worker, replica: Replica, change: Tensor, step: int
    ) -> tuple[float, dict[str, Tensor]]:
        decoded = await worker.decoded(change, replica, step)
        size, missed = await worker.node.call(_squared_norms, change, decoded)
        update = {
            "missed": torch.tensor(missed, dtype=torch.float64),
            "num_silent": torch.zeros((), dtype=torch.int64),
        }
        return size - 3 * (missed + float(replica.memory["missed"])), update

    def must_send(self, replica: Replica) -> bool:
        return super().must_send(replica) or bool(replica.memory["num_silent"] >= self.patience)

    def after_skipping(self, replica: Replica) -> Replica:
        return replica.remembering(num_silent=replica.memory["num_silent"] + 1)


def _squared_norms(change: Tensor, decoded: Tensor) -> tuple[float, float]:
    return squared_norm(decoded), squared_norm(change - decoded)
