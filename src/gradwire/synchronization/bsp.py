"""Bulk-synchronous parallel SGD (Valiant 1990; Dekel et al. 2012).

All workers hold the same model; every step they average their gradients and take the same
optimizer step:  x <- x - lr * (1/n) sum_i grad F_i(x)
"""

from dataclasses import dataclass

from gradwire.core.protocols import Replica, Synchronization, Worker


@dataclass(frozen=True, repr=False)
class BSP(Synchronization):
    """Average the gradients of all workers in every step."""

    paper = "Valiant 1990, A bridging model for parallel computation"

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        mean, replica = await worker.mean_gradient(replica, step)
        if mean is None:
            return replica
        return await worker.update(replica, mean, step, shared=True)
