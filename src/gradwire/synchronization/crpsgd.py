"""Parallel SGD with growing batches, CR-PSGD (Yu and Jin 2019, "On the computation and
communication complexity of parallel SGD with dynamic batch sizes", Alg. 1).

In round r every worker adds up the gradients of B_r = floor(growth^r) mini-batches, all at the same
parameters; the mean over all of them and all workers makes one step of the optimizer:

    x <- x - lr * (1/n) sum_i (1/B_r) sum_{b=1..B_r} G_i(x; b)

T mini-batches make about log(T) / log(growth) rounds, and where the objective satisfies the
Polyak-Lojasiewicz condition the rate is that of T steps of parallel SGD. A step here is a
mini-batch. With growth 1 it is bsp.

Where we differ: the batch stops growing at `most`, if that is given, since too few steps are
harmful where the condition does not hold; and the last step of a run ends an unfinished round
early. A mini-batch with NaN or infinity is left out of the mean; a worker that has no other drops
the round on all (nonfinite="skip").
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradwire.core.protocols import Replica, Synchronization, Worker


@dataclass(frozen=True, repr=False)
class CRPSGD(Synchronization):
    """Average gradients over batches that grow by a factor from one round to the next."""

    growth: float
    most: int = 0  # mini-batches in a round; 0: there is no limit

    examples = ("crpsgd(1.1)", "crpsgd(1.5, most=64)")
    paper = (
        "Yu and Jin 2019, On the computation and communication complexity of parallel SGD with "
        "dynamic batch sizes for stochastic non-convex optimization"
    )

    def __post_init__(self) -> None:
        if not 1.0 <= self.growth < float("inf"):
            raise ValueError(
                f"crpsgd: growth must be finite and at least 1, got {self.growth}. Try 1.1; "
                "1 is bsp."
            )
        if self.most < 0:
            raise ValueError(
                f"crpsgd: most is a number of mini-batches, got {self.most}. 0 means no limit."
            )

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return {
            "gradients": torch.zeros_like(params),  # their sum since the round began
            "num_added": torch.zeros((), dtype=torch.int64),
        }

    def ends_round(self, step: int, num_steps: int) -> bool:
        return step in _round_ends(self.growth, self.most, num_steps)

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        node = worker.node
        gradient, replica = await worker.gradient(replica, step)
        total, count = replica.memory["gradients"], replica.memory["num_added"]
        if gradient is not None:
            total, count = await node.call(torch.add, total, gradient), count + 1
        if not self.ends_round(step, worker.num_steps):
            return replica.remembering(gradients=total, num_added=count)
        own = await node.call(torch.div, total, int(count) or torch.nan)
        mean, replica = await worker.mean(own, replica, step)
        if mean is not None:
            replica = await worker.update(replica, mean, step, shared=True)
        return replica.remembering(**self.memory(replica.params))


@lru_cache(maxsize=16)
def _round_ends(growth: float, most: int, num_steps: int) -> frozenset[int]:
    """The steps that end a round; the last one of a run always does."""
    ends, done, number = [num_steps - 1], 0, 0
    while done < num_steps:
        size = int(growth**number)
        done += min(size, most) if most else size
        ends.append(done - 1)
        number += 1
    return frozenset(ends)
