"""Post-local SGD (Lin et al. 2020, "Don't use large mini-batches, use local SGD", sec. 3).

Bulk-synchronous until step `start`, then local SGD with rounds of `period` steps:  H_t = 1 for
t < start, H_t = period from then on. The paper switches when the learning rate is first lowered:
by then the noise of local steps helps to generalise and does no harm.

What travels are steps in both phases, -lr * gradient in the first, so that what error feedback
holds back is of one kind before and after the switch. In a step with a learning rate of zero, as at
the start of a warm-up, nothing travels and nothing moves, momentum neither.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.protocols import Replica, Synchronization, Worker
from gradwire.synchronization.localsgd import LocalSGD


@dataclass(frozen=True, repr=False)
class PostLocalSGD(Synchronization):
    """Average gradients until step `start`, then models after every `period` steps alone."""

    start: int
    period: int
    momentum: Literal["local", "average", "reset"] = "local"  # as in localsgd

    examples = ("postlocalsgd(1000, period=8)",)
    short_examples = ("postlocalsgd(8, period=4)",)
    exchanges = "walks"
    paper = "Lin et al. 2020, Don't use large mini-batches, use local SGD"

    def __post_init__(self) -> None:
        if self.start < 0:
            raise ValueError(f"postlocalsgd: start is a step, not below 0, got {self.start}")
        LocalSGD(self.period, self.momentum)  # refuses what it refuses

    @property
    def _local_phase(self) -> LocalSGD:
        return LocalSGD(self.period, self.momentum)

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return self._local_phase.memory(params)

    def agreed(self, replica: Replica) -> Tensor:
        return self._local_phase.agreed(replica)

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        if step >= self.start:
            return await self._local_phase.step_of_round(worker, replica, step, begin=self.start)
        scale = -worker.lr(step)
        if not scale:  # a warm-up from zero: no step, so nothing to agree on
            _, replica = await worker.gradient(replica, step)
            return replica
        mean, replica = await worker.mean_gradient(replica, step, scale=scale)
        if mean is None:
            return replica
        gradient = await worker.node.share(torch.div, mean, scale)
        replica = await worker.update(replica, gradient, step, shared=True)
        return replica.remembering(anchor=replica.params)
