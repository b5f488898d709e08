"""Base of lazily aggregated gradients: a worker sends its gradient only if it changed enough.

Worker i holds g_i, the gradient that it sent last, as decoded, and the mean of all g_j,
with which all workers take the same step of the optimizer:

    g_i <- g_i + C(G_i(x) - g_i)   if worker i sends, else g_i stays x   <- x - lr * (1/n) sum_i g_i

Workers send changes relative to g_i, so the next change contains what the codec C lost of this one.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.notation import notation_name
from gradwire.core.protocols import Counts, Replica, Synchronization, Worker


@dataclass(frozen=True, repr=False)
class Lazy(Synchronization):
    """A worker sends only if its gradient changed much compared with recent moves of the model."""

    threshold: float  # xi: laziness; 0 always sends
    window: int = 10  # D: the number of recent moves

    sends_changes = True

    def __post_init__(self) -> None:
        name = notation_name(type(self))
        if not 0 <= self.threshold < float("inf"):
            raise ValueError(
                f"{name}: threshold must be finite and not negative, got {self.threshold}. "
                "Try 0.1; 0 always sends, larger is lazier."
            )
        if self.window < 1:
            raise ValueError(f"{name}: window is a number of steps from 1 on, got {self.window}")

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return {
            "sent": torch.zeros_like(params),  # g_i
            "aggregate": torch.zeros_like(params),  # the mean of all g_i
            "moves": torch.zeros(self.window, dtype=torch.float64),  # their squares, the last first
            "num_uploads": torch.zeros((), dtype=torch.int64),
        }

    def counts(self, memories: Sequence[Mapping[str, Tensor]]) -> dict[str, Counts]:
        uploads = [float(memory["num_uploads"]) for memory in memories]
        return {"uploads": Counts(sum(uploads), len(uploads), max(uploads))}

    @abstractmethod
    async def change_size(
        self, worker: Worker, replica: Replica, change: Tensor, step: int
    ) -> tuple[float, dict[str, Tensor]]:
        """The squared size of a change, and the memory to keep if it is sent."""

    def bound(self, replica: Replica) -> float:
        """The bound that |lr * change|^2 must exceed: sum_d xi |x_{t+1-d} - x_{t-d}|^2."""
        return self.threshold * float(replica.memory["moves"][: self.window].sum())

    def must_send(self, replica: Replica) -> bool:
        return not replica.memory["num_uploads"]  # the first time

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        node = worker.node
        gradient, replica = await worker.gradient(replica, step)
        sent, sends = replica.memory["sent"], False
        update: dict[str, Tensor] = {}
        if gradient is None:
            change = torch.zeros_like(sent)
        else:
            change = await node.call(torch.sub, gradient, sent)
            size, update = await self.change_size(worker, replica, change, step)
            sends = worker.lr(step) ** 2 * size > self.bound(replica) or self.must_send(replica)
        mean, own, replica = await worker.mean_of_some(change, sends, replica, step)
        aggregate = await node.share(torch.add, replica.memory["aggregate"], mean)
        lr, moves = worker.lr(step), replica.memory["moves"]
        moves = await node.share(_record_move, moves, aggregate, lr, self.window)
        replica = await worker.update(replica, aggregate, step, shared=True)
        replica = replica.remembering(aggregate=aggregate, moves=moves)
        if not sends:
            return self.after_skipping(replica)
        count = replica.memory["num_uploads"] + 1
        return replica.remembering(
            sent=await node.call(torch.add, sent, own), num_uploads=count, **update
        )

    def after_skipping(self, replica: Replica) -> Replica:
        return replica


def squared_norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _record_move(moves: Tensor, aggregate: Tensor, lr: float, window: int) -> Tensor:
    """The squares of the last moves, with the one that plain SGD makes now."""
    return torch.cat([moves.new_tensor([lr**2 * squared_norm(aggregate)]), moves])[:window]
