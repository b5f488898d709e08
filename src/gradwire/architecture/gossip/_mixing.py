"""One worker's rounds with its neighbours: implements `core.protocols.Mixing`."""

import torch
from torch import Tensor

from gradwire.architecture.gossip._algorithm import GossipAlgorithm
from gradwire.architecture.gossip._neighbours import Neighbours
from gradwire.core.protocols import Replica, Worker


class GossipMixing:
    """Runs an algorithm's rounds among the neighbours of one worker."""

    def __init__(self, algorithm: GossipAlgorithm, neighbours: Neighbours) -> None:
        self.algorithm = algorithm
        self.neighbours = neighbours

    @property
    def params(self) -> Tensor | None:
        """The current model. Without rounds others average with it after the last step, too."""
        return self.neighbours.presence.model

    async def attend(self, replica: Replica, step: int) -> None:
        """Training has come to this step; for steps in which no round begins."""
        await self.neighbours.presence.attend(replica.params, step)

    async def before(self, replica: Replica, step: int, period: int = 1) -> Replica:
        self.neighbours.period = period
        await self.neighbours.presence.attend(replica.params, step)
        # In the memory, because the round may end in another segment of the run.
        replica = replica.remembering(round=torch.tensor(step))
        return await self.algorithm.before(self.neighbours, replica, step)

    async def after(self, replica: Replica, walk: Tensor, step: int) -> Replica:
        neighbours, presence = self.neighbours, self.neighbours.presence
        await presence.attend(replica.params, step)
        number = int(replica.memory["round"])
        replica = await self.algorithm.after(neighbours, replica, walk, number)
        presence.model, presence.is_new = replica.params, False
        return replica

    async def miss(self, step: int) -> None:
        await self.neighbours.miss(step)

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        return await self.algorithm.step(self.neighbours, worker, replica, step)

    async def rejoin(self, replica: Replica) -> tuple[Replica, int]:
        return await self.algorithm.rejoin(self.neighbours, replica)
