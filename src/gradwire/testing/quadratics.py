"""Quadratics to train on, one per worker, with everything else as in a real run.

Worker i minimises f_i(x) = a_i/2 |x - b_i|^2, so its gradient is a_i (x - b_i), in float64. The
minimum of the mean is at sum_i a_i b_i / sum_i a_i. With a drift the minimum moves from batch to
batch: in number k it is b_i + k drift.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gradwire.architecture import ARCHITECTURE
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.protocols import Architecture, Replica, Synchronization
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.compute_time import COMPUTE_TIME, STRAGGLERS, Computer
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.scheduling import SCHEDULING
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.training import program as program_of
from gradwire.training.flat import FlatLayout, FlatTensor
from gradwire.training.gradient import Batch, GradientRequest, GradientResult
from gradwire.training.optimizer import SGD, Optimizer
from gradwire.training.plan import Plan
from gradwire.training.schedule import Constant, Schedule
from gradwire.training.server import TrainingServer
from gradwire.training.worker import TrainingWorker


class Quadratics:
    """A stand-in for `training.task.Task`. A batch is (a_i, b_i); gradients may have noise."""

    def __init__(
        self, layers: Sequence[int], start: Tensor, noise: float, bad: Collection[tuple[int, int]]
    ) -> None:
        self.device = torch.device("cpu")
        stops = torch.tensor(layers).cumsum(0).tolist()
        self.layout = FlatLayout(
            tuple(
                FlatTensor(f"layer {i}", stop - size, stop, (size,))
                for i, (size, stop) in enumerate(zip(layers, stops))
            )
        )
        self.start = start
        self.noise = noise
        self.bad = bad  # (rank, step) at which a gradient is NaN

    def initial_params(self) -> Tensor:
        return self.start.clone()

    def initial_buffers(self) -> dict[str, Tensor]:
        return {"running": torch.zeros((), dtype=torch.float64)}

    def gradients(self, requests: Sequence[GradientRequest]) -> list[GradientResult]:
        return [self._gradient(request) for request in requests]

    def _gradient(self, request: GradientRequest) -> GradientResult:
        key, x, a, b = request.key, request.params, request.inputs, request.targets
        gradient = a * (x - b)
        if self.noise:
            gradient = gradient + self.noise * key.child("noise").normal(x.numel()).double()
        if (key.rank, key.step) in self.bad:
            gradient = torch.full_like(gradient, torch.nan)
        running = 0.9 * request.buffers["running"] + 0.1 * gradient.mean()
        loss = (a / 2 * (x - b).square().sum()).reshape(())
        return GradientResult(loss, gradient, {"running": running})


class RecordingServer(TrainingServer):
    """Also keeps the values that were noted, in order."""

    def __init__(self, plan: Plan, number: int) -> None:
        super().__init__(plan, number)
        self.noted: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> None:
        super().note(name, value)
        self.noted.setdefault(name, []).append(value)


@dataclass(frozen=True)
class Trained:
    """The result of a training on quadratics."""

    plan: Plan
    replicas: list[Replica]
    servers: list[RecordingServer]
    engine: VirtualEngine
    after: dict[tuple[int, int], Replica]  # (rank, step) -> the replica after it
    times: dict[tuple[int, int], float]  # (rank, step) -> when it was done, in virtual seconds
    curvatures: Tensor  # a, [n]
    minima: Tensor  # b, [n, d]
    drift: float

    @property
    def params(self) -> list[Tensor]:
        return [replica.params for replica in self.replicas]

    @property
    def agreed(self) -> Tensor:
        """The model that would be evaluated: that of rank 0."""
        return self.plan.synchronization.agreed(self.replicas[0])

    @property
    def optimum(self) -> Tensor:
        """Of the mean of all f_i."""
        return self.curvatures @ self.minima / self.curvatures.sum()

    @property
    def initial(self) -> Tensor:
        return self.plan.task.initial_params()

    @property
    def time_s(self) -> float:
        return self.engine.now

    @property
    def sent_bytes(self) -> int:
        return self.engine.ledger.total_bytes

    def gradient(self, rank: int, x: Tensor, batch: int = 0) -> Tensor:
        """Of f_i, without noise."""
        return self.curvatures[rank] * (x - self.minima[rank] - batch * self.drift)


Train = Callable[..., Trained]


def train(
    synchronization: str | Synchronization,
    architecture: str | Architecture = "allreduce",
    compression: str = "identity",
    *,
    workers: int = 4,
    steps: int = 10,
    lr: float = 0.1,
    momentum: float = 0.0,
    optimizer: Optimizer | None = None,  # in place of lr and momentum
    schedule: Schedule | None = None,
    scheduling: str = "sequential",
    compute: str = "fixed(0.01)",
    stragglers: str = "nobody",
    bandwidth: str = "10Gbit",
    latency: str = "50us",
    layers: Sequence[int] = (5, 3),  # sizes of the model's tensors
    curvatures: Sequence[float] | None = None,  # a_i; 1, 1.5, 2, ... by default
    minima: Tensor | None = None,  # b_i, [n, d]; drawn by default
    start: Tensor | None = None,  # [d]; drawn by default
    drift: float = 0.0,  # of each entry of the minima, from batch to batch
    noise: float = 0.0,  # deviation of each entry of a gradient
    bad: Collection[tuple[int, int]] = (),  # (rank, step) at which a gradient is NaN
    pause_at: Sequence[int] = (),  # steps before which the run ends and resumes
    faults: Sequence[str] = (),
    heartbeat_s: float = 0.5,
    seed: int = 0,
    **settings: Any,  # of the plan: nonfinite, clip_norm, num_examples, batch_size, ...
) -> Trained:
    """Trains on quadratics: `train("ssp(2)", "parameter_server", workers=3, steps=20)`."""
    key, numel = Key(seed), sum(layers)
    a = torch.tensor(curvatures or [1 + i / 2 for i in range(workers)], dtype=torch.float64)  # [n]
    b = key.child("minima").normal(workers * numel).double().view(workers, numel)
    b = b if minima is None else minima.double()
    x = key.child("start").normal(numel).double() if start is None else start.double()

    def batch(rank: int, step: int) -> Batch:
        return a[rank], b[rank] + step * drift

    plan = Plan(
        task=Quadratics(layers, x, noise, frozenset(bad)),  # type: ignore[arg-type]
        batch=batch,
        optimizer=optimizer or SGD(lr, momentum),
        schedule=schedule or Constant(),
        reducer=lift(COMPRESSION.parse(compression)),
        synchronization=SYNCHRONIZATION.parse(synchronization),
        architecture=ARCHITECTURE.parse(architecture),
        scheduling=SCHEDULING.parse(scheduling),
        num_workers=workers,
        num_steps=steps,
        key=key,
        **settings,
    )
    computer = Computer(
        COMPUTE_TIME.parse(compute),
        STRAGGLERS.parse(stragglers),
        (1.0,) * workers,
        key.child("computer"),
    )
    num_servers = plan.architecture.num_servers if plan.ability == "push_pull" else 0
    servers = [RecordingServer(plan, number) for number in range(num_servers)]
    num_others = plan.architecture.num_others
    keeps: list[dict[Any, Any]] = [{} for _ in range(num_others)]

    def daemon(number: int) -> Callable[[Node], Any]:
        if number < num_servers:
            return servers[number].run
        return lambda node: plan.architecture.daemon(node, keeps[number], plan.limits())

    engine = VirtualEngine(
        Network.parse(workers, bandwidth, latency, num_others),
        workers,
        evaluate=plan.task.gradients,
        seconds=lambda rank, request: computer.seconds(rank, request.key.step),
        faults=faults,
        heartbeat_s=heartbeat_s,
        key=key.child("engine"),
    )
    replicas = plan.initial_replicas()
    after: dict[tuple[int, int], Replica] = {}
    times: dict[tuple[int, int], float] = {}

    class StepRecorder:
        def worker_started(self, worker: TrainingWorker) -> None:
            pass

        def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
            after[rank, step], times[rank, step] = replica, now

    def segment(first: int, last: int) -> list[Replica]:
        before = list(replicas)

        def program(node: Node) -> Any:
            return program_of.train(plan, node, before[node.rank], first, last, StepRecorder())

        def rejoin(node: Node) -> Any:
            return program_of.rejoin(plan, node, last, StepRecorder())

        daemons = [daemon(number) for number in range(num_others)]
        return engine.run([program] * workers, daemons, rejoin)

    for first, last in pairwise((0, *pause_at, steps)):
        replicas = segment(first, last)
    return Trained(plan, replicas, servers, engine, after, times, a, b, drift)
