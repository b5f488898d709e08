"""Base of algorithms whose workers push gradients and pull models independently."""

from gradwire.core.protocols import Ability, Replica, Synchronization, Worker


class Pushing(Synchronization):
    """Push a gradient, continue with the model that the servers answer."""

    @property
    def needs(self) -> tuple[Ability, ...]:
        return ("push_pull",)

    @property
    def pauses(self) -> bool:
        return False

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        pulled = await worker.push_pull_gradient(replica, step)
        assert pulled is not None
        return pulled.replica
