"""One worker of a training run: where the four dimensions meet.

A `Plan` holds what all workers of a run share. A `TrainingWorker` is one rank's view of it: it
gives a synchronization algorithm its gradients, averages and updates, and is itself built from a
node, a schedule, an architecture's groups and a reducer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradwire.core.codec import is_finite
from gradwire.core.errors import NonFiniteError
from gradwire.core.group import concatenate
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.protocols import (
    Architecture,
    Bucket,
    Replica,
    Scheduling,
    Synchronization,
    check_fit,
)
from gradwire.core.ramp import at
from gradwire.core.reducer import Reducer
from gradwire.core.spec import Spec
from gradwire.training.gradient import Batch, GradientRequest, GradientResult
from gradwire.training.optimizer import Optimizer, clip_by_norm
from gradwire.training.schedule import Schedule
from gradwire.training.task import Task

NonFinite = Literal["error", "skip"]


@dataclass(frozen=True)
class Plan:
    """What is trained, and how: the same on every rank."""

    task: Task
    batch: Callable[[int, int], Batch]  # (rank, step) -> mini-batch
    optimizer: Optimizer
    schedule: Schedule
    reducer: Reducer
    synchronization: Synchronization
    architecture: Architecture
    scheduling: Scheduling
    num_workers: int
    num_steps: int
    key: Key
    clip_norm: float | None = None
    local_clip: bool = False  # clip each worker's gradient to sqrt(n) times it, not the mean
    local_decay: float = 0.0  # weight decay, added to each worker's gradient
    nonfinite: NonFinite = "error"
    steps_per_epoch: float | None = None  # for hyper-parameters that change with time

    def __post_init__(self) -> None:
        check_fit(self.synchronization, self.architecture)
        self.reducer.check_names([tensor.name for tensor in self.task.layout.tensors])

    def buckets(self) -> list[Bucket]:
        return self.scheduling.buckets(self._tensors())

    def tensor_at(self, position: int) -> str:
        """The name of the model's tensor that holds this element of the flat vector."""
        return next(tensor.name for tensor in self._tensors() if position < tensor.stop)

    def _tensors(self) -> list[Bucket]:
        return [Bucket(t.name, t.start, t.stop) for t in self.task.layout.tensors]

    def spec(self, bucket: Bucket, dtype: torch.dtype) -> Spec:
        """What a reducer is told about a bucket: its size, and the tensors that lie in it."""
        tensors = []
        for name, start, stop, shape in self.task.layout.tensors:
            first, last = max(start, bucket.start), min(stop, bucket.stop)
            if first < last:
                whole = (first, last) == (start, stop)  # a piece of a matrix is a vector
                placed = (first - bucket.start, last - bucket.start)
                tensors.append((name, *placed, shape if whole else (last - first,)))
        return Spec((bucket.numel,), dtype, tensors=tuple(tensors))

    def initial_replicas(self) -> list[Replica]:
        """One per worker: the same model, and the same tensors, until they go separate ways."""
        params = self.task.initial_params()
        buffers = self.task.initial_buffers()
        optimizer = self.optimizer.init(params)
        memory = self.synchronization.memory(params)
        specs = [self.spec(bucket, params.dtype) for bucket in self.buckets()]
        return [
            Replica(
                params,
                buffers,
                optimizer,
                tuple(self.reducer.init(spec, self.num_workers) for spec in specs),
                memory,
            )
            for _ in range(self.num_workers)
        ]

    async def train(self, node: Node, replica: Replica, first: int, last: int) -> Replica:
        """The program of one rank for steps first .. last - 1."""
        worker = TrainingWorker(self, node)
        for step in range(first, last):
            synchronization = at(self.synchronization, step, self.steps_per_epoch)
            replica = await synchronization.step(worker, replica, step)
        return replica


class _Dropped(Exception):
    """This step is dropped on every rank."""


class TrainingWorker:
    """One rank's abilities, as `core.protocols.Worker` has them."""

    def __init__(self, plan: Plan, node: Node) -> None:
        self.plan = plan
        self.node = node
        self._buckets = plan.buckets()

    @property
    def rank(self) -> int:
        return self.node.rank

    @property
    def size(self) -> int:
        return self.node.size

    @property
    def num_steps(self) -> int:
        return self.plan.num_steps

    async def gradient(self, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        result = await self._evaluated(replica, step)
        if not is_finite(result.gradient):
            if self.plan.nonfinite == "error":
                raise NonFiniteError(self._complaint(result.gradient, "gradient", step))
            return None, _dropping(replica)
        return result.gradient, replica.having(buffers=result.buffers, loss=result.loss)

    async def mean_gradient(self, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        backward = _Gradient(self, replica, step)
        mean, exchange = await self._exchange(backward, replica, step)
        if mean is None:
            return None, _dropping(replica)
        result = backward.result
        assert result is not None
        return mean, replica.having(exchange=exchange, buffers=result.buffers, loss=result.loss)

    async def mean(self, x: Tensor, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        mean, exchange = await self._exchange(_Vector(self, x, step), replica, step)
        if mean is None:
            return None, _dropping(replica)
        return mean, replica.having(exchange=exchange)

    async def update(
        self, replica: Replica, gradient: Tensor, step: int, *, shared: bool
    ) -> Replica:
        plan = self.plan
        rule = at(plan.optimizer, step, plan.steps_per_epoch)
        lr = rule.lr * plan.schedule.factor(step, plan.num_steps)
        work = self.node.share if shared else self.node.call
        clip_norm = None if plan.local_clip else plan.clip_norm
        params, optimizer = await work(
            _update, rule, clip_norm, lr, replica.params, gradient, replica.optimizer
        )
        return replica.having(params=params, optimizer=optimizer)

    async def _evaluated(self, replica: Replica, step: int) -> GradientResult:
        inputs, targets = self.plan.batch(self.rank, step)
        key = self.plan.key.at(step).private(self.rank)
        request = GradientRequest(replica.params, replica.buffers, inputs, targets, key)
        result: GradientResult = await self.node.compute(request)
        return result

    async def _exchange(
        self, backward: "_Gradient | _Vector", replica: Replica, step: int
    ) -> tuple[Tensor | None, tuple[object, ...]]:
        plan, states = self.plan, list(replica.exchange)
        means: list[Tensor | None] = [None] * len(self._buckets)
        number = {bucket: i for i, bucket in enumerate(self._buckets)}
        key = plan.key.at(step).private(self.rank)

        async def reduce(bucket: Bucket, x: Tensor) -> None:
            i = number[bucket]
            group = plan.architecture.group(self.node, bucket.name)
            reduced = await plan.reducer.mean(x, states[i], key.child(bucket.name), group)
            means[i], states[i] = reduced.mean, reduced.state

        try:
            await plan.scheduling.exchange(backward, self._buckets, reduce)
        except _Dropped:
            return None, replica.exchange
        pieces = [mean for mean in means if mean is not None]
        assert len(pieces) == len(self._buckets), f"{plan.scheduling!r} left out a bucket"
        whole = pieces[0] if len(pieces) == 1 else await self.node.share(concatenate, tuple(pieces))
        return whole, tuple(states)

    async def checked(self, x: Tensor, what: str, step: int) -> Tensor:
        """x, if it is finite on every rank that must agree about it."""
        finite = is_finite(x)
        if self.plan.nonfinite == "error":
            if not finite:
                raise NonFiniteError(self._complaint(x, what, step))
        else:
            group = self.plan.architecture.group(self.node, "nonfinite")
            bad = await group.mean(torch.tensor([0.0 if finite else 1.0]))
            if float(bad) > 0:
                raise _Dropped
        return x

    def _complaint(self, x: Tensor, what: str, step: int) -> str:
        where = int((~torch.isfinite(x)).nonzero()[0])
        return (
            f"{float(x[where])} in the {what} of {self.plan.tensor_at(where)} on rank {self.rank} "
            f'in step {step}. Lower the learning rate or set clip_norm; nonfinite="skip" drops '
            "such steps."
        )


class _Gradient:
    """A backward pass under way."""

    def __init__(self, worker: TrainingWorker, replica: Replica, step: int) -> None:
        self.worker = worker
        self.replica = replica
        self.step = step
        self.result: GradientResult | None = None

    async def whole(self) -> Tensor:
        worker, plan = self.worker, self.worker.plan
        self.result = await worker._evaluated(self.replica, self.step)
        gradient = await worker.checked(self.result.gradient, "gradient", self.step)
        if plan.local_clip and plan.clip_norm is not None:
            # The mean of n independent gradients is sqrt(n) times shorter than each.
            most = plan.clip_norm * plan.num_workers**0.5
            gradient = await worker.node.call(clip_by_norm, gradient, most)
        decay = at(plan.local_decay, self.step, plan.steps_per_epoch)
        if decay:
            params = self.replica.params
            gradient = await worker.node.call(_decaying, gradient, params, decay)
        return gradient


class _Vector:
    """A vector that is already there, where a schedule expects a backward pass."""

    def __init__(self, worker: TrainingWorker, x: Tensor, step: int) -> None:
        self.worker = worker
        self.x = x
        self.step = step

    async def whole(self) -> Tensor:
        return await self.worker.checked(self.x, "update", self.step)


def _dropping(replica: Replica) -> Replica:
    return replica.having(num_dropped=replica.num_dropped + 1)


def _decaying(gradient: Tensor, params: Tensor, decay: float) -> Tensor:
    return gradient.add(params, alpha=decay)


def _update(
    optimizer: Optimizer,
    clip_norm: float | None,
    lr: float,
    params: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    if clip_norm is not None:
        gradient = clip_by_norm(gradient, clip_norm)
    return optimizer.update(params, gradient, state, lr)
