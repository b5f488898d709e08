"""What a node of a run does and keeps, by its role: worker, server that holds the model, other.

All engines run these roles. A real process has one of them, the simulator and a replay have all of
them in one process (`AllNodes`).
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.core.node import Node, Tag
from gradwire.core.protocols import Replica
from gradwire.core.wire import REQUEST
from gradwire.experiment.report.figures import distance_of, number
from gradwire.experiment.run.outcome import Model, metrics_row, to_dict
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.setup import Experiment
from gradwire.runtime.interpreter.interpreter import Program
from gradwire.training.plan import Plan
from gradwire.training.program import Observer, rejoin, train
from gradwire.training.server import TrainingServer


class Segment(NamedTuple):
    """Steps first .. last - 1 of the workers."""

    first: int
    last: int
    observer: Observer | None = None
    rejoins: bool = False  # whether workers begin with the model that the others have
    incarnation: float | None = None  # of a worker that joins later; None: the current time


class NodeRole(Protocol):
    """The role of one node, with what it keeps from one segment to the next."""

    @property
    def tags(self) -> tuple[Tag, ...] | None:
        """The tags of all messages that it reads from workers in a segment; None: unknown."""
        ...

    def program(self, segment: Segment) -> Program[Any]:
        """The program of the node in a segment."""
        ...

    def report(self, *, digests: bool) -> Row:
        """What the coordinator must know; with `digests` also the digest of the parameters."""
        ...

    def model(self) -> list[Tensor]:
        """What is evaluated: the parameters that it holds, then the statistics."""
        ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, saved: dict[str, Any], is_replayed: bool = False) -> None:
        """Continues from a snapshot. `is_replayed`: a journal replays what happened since."""
        ...


def make_role(plan: Plan, rank: int, replicas: Sequence[Replica] | None = None) -> NodeRole:
    """The role of a rank at the start; `replicas` are the initial ones of all workers, if known."""
    layout = plan.layout
    if layout.is_worker(rank):
        return WorkerRole(plan, (replicas or plan.initial_replicas())[rank])
    if plan.ability == "push_pull" and layout.is_server(rank):
        return ServerRole(plan, layout.number_of(rank))
    return OtherRole(plan, rank)


class WorkerRole:
    """A worker: its replica."""

    tags = None

    def __init__(self, plan: Plan, replica: Replica) -> None:
        self.plan = plan
        self.replica = replica

    def program(self, segment: Segment) -> Program[Any]:
        first, last, observer, rejoins, incarnation = segment
        if rejoins:
            return lambda node: rejoin(self.plan, node, last, observer, incarnation)
        return lambda node: train(self.plan, node, self.replica, first, last, observer)

    def report(self, *, digests: bool) -> Row:
        replica = self.replica
        counters = {
            name: value.item() for name, value in replica.memory.items() if value.numel() == 1
        }
        return {
            "loss": None if replica.loss is None else float(replica.loss),
            "num_dropped": replica.num_dropped,
            "num_gradients": replica.num_gradients,
            "counters": counters,
            "digest": digest(replica.params) if digests else "",
        }

    def model(self) -> list[Tensor]:
        replica = self.replica
        return [self.plan.synchronization.agreed(replica), *replica.buffers.values()]

    def snapshot(self) -> dict[str, Any]:
        return to_dict(self.replica)

    def restore(self, saved: dict[str, Any], is_replayed: bool = False) -> None:
        self.replica = Replica(**saved)


class ServerRole:
    """A server that holds a shard of the model."""

    tags = (REQUEST,)

    def __init__(self, plan: Plan, number: int) -> None:
        self.server = TrainingServer(plan, number)

    def program(self, segment: Segment) -> Program[Any]:
        return self.server.run

    def report(self, *, digests: bool) -> Row:
        pushes = {str(rank): count for rank, count in self.server.pushes.items()}
        return {"notes": dict(self.server.notes), "pushes": pushes}

    def model(self) -> list[Tensor]:
        return [self.server.params]

    def snapshot(self) -> dict[str, Any]:
        return self.server.snapshot()

    def restore(self, saved: dict[str, Any], is_replayed: bool = False) -> None:
        self.server.restore(saved, is_replayed=is_replayed)


class OtherRole:
    """A node without model, such as the scheduler: it runs a program of the architecture."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        # Servers that form means read requests only; a scheduler also receives how segments went.
        self.tags: tuple[Tag, ...] | None = (REQUEST,) if plan.layout.is_server(rank) else None
        self.limits = plan.limits()
        self.memory: dict[Any, Any] = {}

    def program(self, segment: Segment) -> Program[Any]:
        def daemon(node: Node) -> Any:
            return self.plan.architecture.daemon(node, self.memory, self.limits)

        return daemon

    def report(self, *, digests: bool) -> Row:
        return {}

    def model(self) -> list[Tensor]:
        return []

    def snapshot(self) -> dict[str, Any]:
        return {"memory": self.memory}

    def restore(self, saved: dict[str, Any], is_replayed: bool = False) -> None:
        self.memory = saved["memory"]
        if not is_replayed:  # a checkpoint may have been saved after a worker of that job was lost
            self.plan.architecture.forget_members(self.memory)


class AllNodes:
    """All nodes of a run in one process."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment, self._plan = experiment, experiment.plan
        replicas = self._plan.initial_replicas()  # these share tensors
        self.roles = [
            make_role(self._plan, rank, replicas) for rank in range(self._plan.layout.size)
        ]
        self.workers = [role for role in self.roles if isinstance(role, WorkerRole)]
        self.servers = [role.server for role in self.roles if isinstance(role, ServerRole)]

    @property
    def replicas(self) -> list[Replica]:
        return [worker.replica for worker in self.workers]

    def programs(self, segment: Segment) -> tuple[list[Program[Any]], list[Program[Any]]]:
        """Those of the workers, and those of the other nodes."""
        programs = [role.program(segment) for role in self.roles]
        return programs[: len(self.workers)], programs[len(self.workers) :]

    def set_results(self, results: Sequence[Replica | None]) -> None:
        """What the programs of the workers returned; None: the worker is lost."""
        for worker, replica in zip(self.workers, results):
            if replica is not None:
                worker.replica = replica

    def model(self, present: Sequence[Replica]) -> Model:
        """The model that a run leaves: that of the servers, or of one of these workers."""
        synchronization = self._plan.synchronization
        if self.servers:
            return torch.cat([server.params for server in self.servers]), present[0].buffers
        newest = synchronization.newest(present)
        return synchronization.agreed(newest), newest.buffers

    def evaluate(self, step: int, present: Sequence[Replica], **others: Any) -> Row:
        """A row of metrics; under gossip the models of all these workers are evaluated."""
        agreed = self._plan.synchronization.agreed
        models = [(agreed(replica), replica.buffers) for replica in present]
        return metrics_row(
            self._experiment,
            step,
            models if self._plan.mixes else [self.model(present)],
            _floats([replica.loss for replica in present if replica.loss is not None]),
            distance=number(distance_of([replica.params for replica in present])),
            **others,
        )


def _floats(losses: Sequence[Tensor]) -> list[float]:
    """The losses as numbers, with one read of a device."""
    return torch.stack(list(losses)).tolist() if losses else []


def holders(plan: Plan, workers: list[Row]) -> Sequence[int]:
    """The ranks that hold the model to evaluate: all servers, or one worker that has the newest.

    `workers` are the reports of the workers.
    """
    if plan.ability == "push_pull":
        return plan.layout.servers
    replicas = counter_replicas(workers)
    newest = plan.synchronization.newest(replicas)
    return [next(rank for rank, replica in enumerate(replicas) if replica is newest)]


def counter_replicas(workers: list[Row]) -> list[Replica]:
    """Replicas with nothing but the counters that workers reported."""
    nothing: Mapping[str, Tensor] = {}
    return [
        Replica(
            torch.empty(0),
            nothing,
            nothing,
            (),
            {name: torch.tensor(value) for name, value in row["counters"].items()},
        )
        for row in workers
    ]


def digest(x: Tensor) -> str:
    """A digest that is equal for vectors that are equal bit by bit."""
    flat = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(flat.numpy().data, digest_size=16).hexdigest()
