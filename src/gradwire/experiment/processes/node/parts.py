"""What one node of a run on real processes is: a worker, a server that holds the model, another.

Ranks 0 .. workers - 1 are workers, then come the servers, then whoever else an architecture has.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.core.node import Node, Tag
from gradwire.core.protocols import Replica
from gradwire.core.wire import REQUEST
from gradwire.experiment.report.figures import taken_together
from gradwire.experiment.run.outcome import to_dict
from gradwire.experiment.run.record import Row
from gradwire.runtime.process.engine import Program
from gradwire.training.plan import Plan
from gradwire.training.program import Observer, rejoin, train
from gradwire.training.server import TrainingServer


class Segment(NamedTuple):
    """Steps first .. last - 1 of the workers."""

    first: int
    last: int
    observer: Observer
    comes_back: bool = False  # whether workers begin with what the servers have
    life: float = 0.0  # of this worker: when it came


class Part(Protocol):
    """One node's role, and what it keeps from one segment to the next."""

    @property
    def tags(self) -> tuple[Tag, ...] | None:
        """All that it reads of workers in a segment; None: that depends."""
        ...

    def program(self, segment: Segment) -> Program[Any]:
        """What it does in a segment."""
        ...

    def took(self, result: Any) -> None:
        """What its program returned; None of one that never ends."""
        ...

    def report(self, *, digests: bool) -> Row:
        """What who keeps the record must know; with `digests` also whether its model is that of
        others."""
        ...

    def model(self) -> list[Tensor]:
        """What is evaluated: the parameters that it holds, then the statistics."""
        ...

    def snapshot(self) -> dict[str, Any]: ...

    def restore(self, saved: dict[str, Any], is_replayed: bool = False) -> None:
        """Continues from a snapshot. `is_replayed`: a journal replays what happened since."""
        ...


def part_of(plan: Plan, rank: int) -> Part:
    """The role of a rank."""
    number = rank - plan.num_workers
    if number < 0:
        return WorkerPart(plan, rank)
    if plan.ability == "push_pull" and number < plan.architecture.num_servers:
        return ServerPart(plan, number)
    return OtherPart(plan, number)


def holders(plan: Plan, workers: list[Row]) -> list[int]:
    """The ranks that hold the model to evaluate: all servers, or one worker that has the newest."""
    if plan.ability == "push_pull":
        return [plan.num_workers + number for number in range(plan.architecture.num_servers)]
    replicas = slim(workers)
    newest = plan.synchronization.newest(replicas)
    return [next(rank for rank, replica in enumerate(replicas) if replica is newest)]


class WorkerPart:
    """A worker: its replica."""

    tags = None

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan = plan
        self.replica = plan.initial_replicas()[rank]

    def program(self, segment: Segment) -> Program[Any]:
        first, last, observer, comes_back, life = segment
        if comes_back:
            return lambda node: rejoin(self.plan, node, last, observer, life)
        return lambda node: train(self.plan, node, self.replica, first, last, observer)

    def took(self, result: Any) -> None:
        assert isinstance(result, Replica)
        self.replica = result

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


class ServerPart:
    """A server that holds a shard of the model."""

    tags = (REQUEST,)

    def __init__(self, plan: Plan, number: int) -> None:
        self.server = TrainingServer(plan, number)

    def program(self, segment: Segment) -> Program[Any]:
        return self.server.run

    def took(self, result: Any) -> None:
        pass

    def report(self, *, digests: bool) -> Row:
        pushes = {str(rank): count for rank, count in self.server.pushes.items()}
        return {"notes": dict(self.server.notes), "pushes": pushes}

    def model(self) -> list[Tensor]:
        return [self.server.params]

    def snapshot(self) -> dict[str, Any]:
        return self.server.snapshot()

    def restore(self, saved: dict[str, Any], is_replayed: bool = False) -> None:
        self.server.restore(saved, is_replayed=is_replayed)


class OtherPart:
    """Neither a worker nor such a server: a program of the architecture's own."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan = plan
        # Servers that form means read requests only; a scheduler also receives how segments went.
        is_server = number < plan.architecture.num_servers
        self.tags: tuple[Tag, ...] | None = (REQUEST,) if is_server else None
        self.limits = plan.limits()
        self.keep: dict[Any, Any] = {}

    def program(self, segment: Segment) -> Program[Any]:
        def daemon(node: Node) -> Any:
            return self.plan.architecture.daemon(node, self.keep, self.limits)

        return daemon

    def took(self, result: Any) -> None:
        pass

    def report(self, *, digests: bool) -> Row:
        return {}

    def model(self) -> list[Tensor]:
        return []

    def snapshot(self) -> dict[str, Any]:
        return {"keep": self.keep}

    def restore(self, saved: dict[str, Any], is_replayed: bool = False) -> None:
        self.keep = saved["keep"]
        if not is_replayed:  # a checkpoint may have been saved after a worker of that job was lost
            self.plan.architecture.forget_members(self.keep)


def noted(reports: Sequence[Row]) -> Row:
    """What servers noted, as they reported it: mean and maximum of each."""
    return taken_together([report.get("notes", {}) for report in reports])


def digest(x: Tensor) -> str:
    """A digest that is equal for vectors that are equal bit by bit."""
    flat = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return blake2b(flat.numpy().data, digest_size=16).hexdigest()


def slim(workers: list[Row]) -> list[Replica]:
    """Replicas with nothing but what workers count, as they reported it."""
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
