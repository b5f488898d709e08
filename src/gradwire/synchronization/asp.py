"""Asynchronous SGD (Dean et al. 2012, Downpour SGD with n_push = n_fetch = 1).

A worker pushes its gradient to the servers and continues with the model that they answer; no worker
waits for another:  x <- x - lr * G_i(x')  where x' is the model that worker i last pulled (survey,
eq. 7, for one worker at a time). The staleness of a gradient is the number of updates between the
two. Every push is a full step of the optimizer: n workers make n updates in the time of one round.

With scale_by_staleness the step is divided by the staleness, where that is above one (Zhang et al.
2016, "Staleness-aware Async-SGD for distributed deep learning", eq. 6).

Among neighbours there are no servers: see `gossip(graph, adpsgd)`.

Use it where workers differ in speed and a lower learning rate is affordable: staleness grows with
the number of workers, and with 32 of them rates that suit bsp diverge (survey, Table 2).
"""

from dataclasses import dataclass

from gradwire.core.protocols import (
    Ability,
    Joined,
    Left,
    Pull,
    Push,
    Replica,
    Server,
    Worker,
)
from gradwire.synchronization._pushing import Pushing


@dataclass(frozen=True, repr=False)
class ASP(Pushing):
    """Push a gradient, pull a model, never wait for others."""

    scale_by_staleness: bool = False

    examples = ("asp", "asp(scale_by_staleness=True)")
    paper = "Dean et al. 2012, Large scale distributed deep networks"

    @property
    def needs(self) -> tuple[Ability, ...]:
        # Among neighbours there is no such rule.
        return ("push_pull",) if self.scale_by_staleness else ("push_pull", "mix_async")

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        if worker.ability == "mix_async":
            return await worker.mixing.step(worker, replica, step)
        return await super().step(worker, replica, step)

    async def serve(self, server: Server) -> None:
        memory = server.memory
        memory.setdefault("updates", 0)
        seen = memory.setdefault("seen", {})  # the updates in what each worker has
        while True:
            match await server.event():
                case Push(rank=rank, step=step, x=x):
                    staleness = memory["updates"] - seen.get(rank, 0)
                    server.note("staleness", staleness)
                    scaled = self.scale_by_staleness and staleness > 1
                    await server.update(x, step, 1 / staleness if scaled else 1.0)
                    memory["updates"] += 1
                    seen[rank] = memory["updates"]
                    await server.answer(rank, step + 1)
                case Pull(rank=rank):  # a late joiner starts at the average of the others
                    seen[rank] = memory["updates"]
                    await server.answer(rank, memory["updates"] // server.num_workers)
                case Left() | Joined():
                    pass
