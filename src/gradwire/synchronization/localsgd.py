"""Local SGD (Stich 2019, "Local SGD converges fast and communicates little", Alg. 1).

Every worker takes `period` optimizer steps of its own, then all replace their models by the
average. What travels is the distance walked since the last agreement, so that compression works
on small numbers:  x_i <- x_0 + mean_j(x_j - x_0).  Momentum stays local.
"""

from dataclasses import dataclass

from torch import Tensor

from gradwire.core.protocols import Replica, Synchronization, Worker


@dataclass(frozen=True, repr=False)
class LocalSGD(Synchronization):
    """Take `period` steps alone, then average the models."""

    period: int

    examples = ("localsgd(8)",)
    exchanges = "walks"
    paper = "Stich 2019, Local SGD converges fast and communicates little"

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"localsgd: period must be at least 1, got {self.period}")

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return {"anchor": params}  # the model all workers last agreed on

    def agreed(self, replica: Replica) -> Tensor:
        return replica.memory["anchor"]

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        gradient, replica = await worker.gradient(replica, step)
        if gradient is not None:
            replica = await worker.update(replica, gradient, step, shared=False)
        if (step + 1) % self.period and step + 1 < worker.num_steps:
            return replica  # the last step always ends in an agreement
        anchor = replica.memory["anchor"]
        mean, replica = await worker.mean(replica.params - anchor, replica, step)
        if mean is None:
            return replica.having(params=anchor)  # the walk led nowhere: all go back
        params = await worker.node.share(_walk, anchor, mean)
        return replica.having(params=params, memory={"anchor": params})


def _walk(anchor: Tensor, distance: Tensor) -> Tensor:
    return anchor + distance
