"""The programs of workers: training from one step to another, and joining a running job."""

from typing import Protocol

import torch

from gradwire.core.node import Node
from gradwire.core.protocols import Replica
from gradwire.core.ramp import at
from gradwire.training.plan import Plan
from gradwire.training.wire import JOINING
from gradwire.training.worker import TrainingWorker


class Observer(Protocol):
    """Observes workers while they train. It takes no virtual time."""

    def worker_started(self, worker: TrainingWorker) -> None:
        """A worker starts or joins."""
        ...

    def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
        """A worker has finished a step."""
        ...


async def train(
    plan: Plan,
    node: Node,
    replica: Replica,
    first: int,
    last: int,
    observer: Observer | None = None,
) -> Replica:
    """The program of one rank for steps first .. last - 1."""
    worker = TrainingWorker(plan, node, float(replica.memory.get("life", 0.0)))
    return await _steps(worker, replica, first, last, observer)


async def _steps(
    worker: TrainingWorker, replica: Replica, first: int, last: int, observer: Observer | None
) -> Replica:
    plan, node = worker.plan, worker.node
    if observer is not None:
        observer.worker_started(worker)
    for step in range(first, last):
        synchronization = at(plan.synchronization, step, plan.steps_per_epoch)
        replica = await synchronization.step(worker, replica, step)
        if observer is not None:
            observer.step_finished(node.rank, step, replica, await node.now())
    return replica


async def rejoin(
    plan: Plan,
    node: Node,
    last: int,
    observer: Observer | None = None,
    life: float | None = None,
) -> Replica:
    """The program of a rank that comes (back): it gets the current model, then trains.

    `life` is its incarnation: when it joined, on the scheduler's clock; None: that is now.
    """
    replica = plan.initial_replicas()[node.rank]
    worker = TrainingWorker(plan, node, await node.now() if life is None else life)
    if plan.ability == "push_pull":
        came = torch.tensor(worker.life, dtype=torch.float64)
        pulled = await worker.pull(replica.remembering(life=came), JOINING)
        replica, first = await plan.synchronization.resume(worker, pulled)
    elif plan.ability == "mean":
        raise ValueError(
            f"rank {node.rank} cannot come back: {plan.synchronization!r} on "
            f"{plan.architecture!r} needs all workers from beginning to end. "
            "Try ssp or asp on parameter_server, or gossip."
        )
    else:
        replica, first = await worker.mixing.rejoin(replica)
    return await _steps(worker, replica, first, last, observer)
