"""Gradients under way, as schedules see them (`core.protocols.Backward`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gradwire.core.batched import elementwise
from gradwire.core.codec import is_finite
from gradwire.core.node import Computation, Node
from gradwire.core.profile import Profile
from gradwire.core.protocols import Bucket, Replica
from gradwire.core.ramp import at
from gradwire.core.rows import cut
from gradwire.training.gradient import GradientRequest, StepResult

if TYPE_CHECKING:
    from gradwire.training.worker import TrainingWorker


class Outcome(NamedTuple):
    """What a step leaves besides its gradient."""

    loss: Tensor
    buffers: Mapping[str, Tensor]  # running statistics


class Accumulated(NamedTuple):
    """The mini-batches of a step before the last one, and the request for that."""

    request: GradientRequest
    total: Tensor | None  # the sum of their gradients; None: there are none
    loss: Tensor | None
    num_batches: int  # of the step

    def outcome(self, last: StepResult) -> Outcome:
        """That of the step, given the last mini-batch's."""
        loss = last.loss if self.loss is None else (self.loss + last.loss) / self.num_batches
        return Outcome(loss, last.buffers)


class PendingGradient:
    """A backward pass under way.

    `computation`: it has been started already; None: it starts when a schedule asks for it.
    """

    def __init__(
        self,
        worker: "TrainingWorker",
        replica: Replica,
        step: int,
        scale: float = 1.0,
        computation: Computation | None = None,
    ) -> None:
        self.worker = worker
        self.replica = replica
        self.step = step
        self.scale = scale
        self._last: StepResult | None = None  # of the last mini-batch
        self.was_dropped = False
        self._computation = computation
        self._before: Accumulated | None = None

    @property
    def node(self) -> Node:
        return self.worker.node

    @property
    def profile(self) -> Profile:
        return self.worker.plan.profile

    def outcome(self) -> Outcome:
        """When all gradients are there."""
        assert self._last is not None, "no gradient has been asked for"
        if self._before is None:
            return Outcome(self._last.loss, self._last.buffers)
        return self._before.outcome(self._last)

    def params_of(self, bucket: Bucket) -> Tensor:
        """The parameters at which the gradient of a bucket is computed."""
        return self.replica.params[bucket.start : bucket.stop]

    async def whole(self) -> Tensor:
        worker, plan = self.worker, self.worker.plan
        before = await worker.accumulate(self.replica, self.step)
        last = await worker.node.compute(before.request)
        gradient = await worker.finish_mean(before.total, last.gradient)
        self._before, self._last = before, last
        if plan.ability == "push_pull" and plan.nonfinite == "skip":
            # Servers wait for this push and no other worker knows of the problem: it pushes zeros.
            if not is_finite(gradient):
                self.was_dropped = True
                return torch.zeros_like(gradient)
        elif not plan.encoding_checks:
            gradient = await worker.checked(gradient, "gradient", self.step)
        gradient = await worker.ready(gradient, self.replica, self.step, plan.clips_locally)
        if self.scale != 1.0:
            gradient = await worker.node.call(torch.mul, gradient, self.scale)
        return gradient

    async def ready(self, bucket: Bucket) -> Tensor:
        worker, plan = self.worker, self.worker.plan
        if self._computation is None:
            self._before = await worker.accumulate(self.replica, self.step)
            self._computation = await worker.node.begin(self._before.request)
        layer = plan.profile.first_layer(bucket)
        last: StepResult = await worker.node.reach(self._computation, layer)
        self._last = last
        total = None if self._before is None else self._before.total
        if total is not None:
            total = cut(total, bucket.start, bucket.stop)
        piece = await worker.finish_mean(total, last.piece(bucket.start, bucket.stop))
        if not plan.encoding_checks:
            worker.check_piece(piece, bucket, self.step)
        decay = at(plan.local_decay, self.step, plan.steps_per_epoch)
        if decay:
            piece = await worker.node.call(add_weight_decay, piece, self.params_of(bucket), decay)
        if self.scale != 1.0:
            piece = await worker.node.call(torch.mul, piece, self.scale)
        return piece


class PendingVector:
    """A vector that is ready, in place of the backward pass that a schedule expects."""

    def __init__(
        self,
        worker: "TrainingWorker",
        x: Tensor,
        step: int,
        members: Sequence[int] | None = None,
    ) -> None:
        self.worker = worker
        self.x = x
        self.step = step
        self.members = members
        self.was_dropped = False
        self._checked: Tensor | None = None

    @property
    def node(self) -> Node:
        return self.worker.node

    @property
    def profile(self) -> Profile:
        return self.worker.plan.profile

    async def whole(self) -> Tensor:
        worker = self.worker
        if worker.ability == "push_pull" and worker.plan.nonfinite == "skip":
            # As with gradients: it pushes zeros.
            self.was_dropped = not is_finite(self.x)
            return torch.zeros_like(self.x) if self.was_dropped else self.x
        return await worker.checked(self.x, "update", self.step, self.members)

    async def ready(self, bucket: Bucket) -> Tensor:
        if self._checked is None:
            self._checked = await self.whole()
        return cut(self._checked, bucket.start, bucket.stop)


@elementwise
def add_weight_decay(gradient: Tensor, params: Tensor, decay: float) -> Tensor:
    return gradient.add(params, alpha=decay)


def evaluated(replica: Replica, outcome: Outcome | None) -> Replica:
    """The replica after a gradient. None: it was dropped, with its statistics and its loss."""
    count = replica.num_gradients + 1
    if outcome is None:
        return replica.having(num_gradients=count)
    return replica.having(num_gradients=count, buffers=outcome.buffers, loss=outcome.loss)
