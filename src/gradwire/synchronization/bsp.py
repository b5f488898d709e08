"""Bulk-synchronous parallel SGD (Valiant 1990; Dekel et al. 2012).

All workers hold the same model; every step they average their gradients and take the same
optimizer step:  x <- x - lr * (1/n) sum_i grad F_i(x)

By default every worker must take part: the loss of a worker ends the run. With servers that hold
the model, two policies let a step complete without some workers (workers may then be at different
steps):
- backup=e: servers take the first n - e gradients of a step and ignore the others (Chen et al.
  2016, "Revisiting distributed synchronous SGD", Algs. 3 and 4). It needs n - e workers to
  continue.
- timeout: from the first gradient of a step on servers wait so many seconds for the others.
The mean is over the gradients received. A gradient that comes too late is not used: its sender gets
the current model, continues with the current step, and its error feedback is as if it had not
pushed. Each server decides on its own. The pushes of a lost worker to an incomplete step are not
used.

Use it first: it is the reference for all others. Take backup=1 or 2 where occasional steps are
slow; the work of these workers is lost, so prefer ssp where many are slow.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from gradwire.core.errors import WireError
from gradwire.core.protocols import (
    Ability,
    Joined,
    Left,
    Pull,
    Push,
    Replica,
    Server,
    Synchronization,
    TimedOut,
    Worker,
)
from gradwire.synchronization._rounds import mixed_step


@dataclass(frozen=True, repr=False)
class BSP(Synchronization):
    """Average the gradients of all workers in every step."""

    backup: int = 0  # workers without which a step may complete
    timeout: float | None = None  # seconds

    examples = ("bsp", "bsp(backup=1)", "bsp(timeout=0.5)")
    short_examples = ("bsp", "bsp(backup=1)")
    steps_on_mean = True
    paper = "Valiant 1990, A bridging model for parallel computation"

    def __post_init__(self) -> None:
        if self.backup < 0:
            raise ValueError(f"bsp: backup must be at least 0, got {self.backup}")
        if self.timeout is not None and not 0 <= self.timeout < inf:
            raise ValueError(f"bsp: timeout must be at least 0 and finite, got {self.timeout}")

    @property
    def _waits_for_all(self) -> bool:
        return self.backup == 0 and self.timeout is None

    @property
    def needs(self) -> tuple[Ability, ...]:
        return ("mean", "push_pull", "mix") if self._waits_for_all else ("push_pull",)

    @property
    def pauses(self) -> bool:
        return self._waits_for_all

    def check(self, num_workers: int, num_buckets: int) -> None:
        if self.backup >= num_workers:
            raise ValueError(
                f"{self!r} does without {self.backup} of {num_workers} workers, and none would be "
                "left. Take a smaller backup."
            )

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        # The step of the servers: a late worker skips the steps before it.
        return {} if self._waits_for_all else {"clock": torch.tensor(0)}

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        if worker.ability == "push_pull":
            return await self._push(worker, replica, step)
        if worker.ability == "mix":
            return await mixed_step(worker, replica, step)
        return await worker.mean_step(replica, step)

    async def _push(self, worker: Worker, replica: Replica, step: int) -> Replica:
        if not self._waits_for_all and step < int(replica.memory["clock"]):
            return replica
        pulled = await worker.push_pull_gradient(replica, step)
        assert pulled is not None
        if self._waits_for_all:
            return pulled.replica
        return pulled.replica.remembering(clock=torch.tensor(pulled.clock))

    async def serve(self, server: Server) -> None:
        memory = server.memory
        memory.setdefault("clock", 0)  # the step that is collected
        pushes: dict[int, Tensor] = memory.setdefault("pushes", {})
        deadline = None
        if self.timeout is not None and pushes:  # it continues from a snapshot
            deadline = await server.now() + self.timeout
        for rank in range(server.num_workers):
            if rank not in server.members:
                await self._do_without(server, rank)
        while True:
            timeout_s = None if deadline is None else max(0.0, deadline - await server.now())
            timed_out = False
            match await server.event(timeout_s):
                case Push(rank=rank, step=step, x=x):
                    if step < memory["clock"]:
                        await server.answer(rank, memory["clock"], accepted=False)
                        continue
                    if step > memory["clock"] or rank in pushes:
                        raise WireError(
                            f"rank {rank} pushed step {step}, but step {memory['clock']} is "
                            f"collected, with pushes of ranks {sorted(pushes)}"
                        )
                    pushes[rank] = x
                    if self.timeout is not None and deadline is None:
                        deadline = await server.now() + self.timeout
                case Pull(rank=rank):  # it joins
                    await server.answer(rank, memory["clock"])
                case Left(rank=rank):
                    await self._do_without(server, rank)
                    pushes.pop(rank, None)  # it may come back and push this step again
                    if not pushes:
                        deadline = None
                case Joined():
                    pass
                case TimedOut():
                    timed_out = True
            enough = server.num_workers - self.backup
            if self.timeout is not None:
                enough = min(enough, len(server.members))
            if pushes and (timed_out or len(pushes) >= enough):
                deadline = None
                server.note("gradients", len(pushes))
                mean = await server.mean([pushes[rank] for rank in sorted(pushes)])
                await server.update(mean, memory["clock"])
                memory["clock"] += 1
                waiting = list(pushes)
                pushes.clear()
                for rank in waiting:
                    await server.answer(rank, memory["clock"])

    async def _do_without(self, server: Server, rank: int) -> None:
        """Stops if too few are left."""
        too_few = len(server.members) < server.num_workers - self.backup
        if self.timeout is None and too_few:
            raise await server.lost(rank)
