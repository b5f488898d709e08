"""Steps whose forward pass starts while the exchange of the step before is still under way.

Each bucket is exchanged and updated by itself: the model is in pieces, one for each bucket. A layer
of the next forward pass may start when the pieces that it lies in have been updated. The numbers
are those of steps that follow one another, since optimizers work on each element by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.core.codec import State
from gradwire.core.group import Gate
from gradwire.core.node import Computation, RunningProgram
from gradwire.core.protocols import Bucket, Replica
from gradwire.core.ramp import at
from gradwire.training.backward import PendingGradient, evaluated
from gradwire.training.gradient import GradientRequest
from gradwire.training.pieces import ModelPieces, cut

if TYPE_CHECKING:
    from gradwire.training.worker import TrainingWorker


@dataclass(slots=True)
class _Pieces:
    """A model in pieces, some of which may still be under way."""

    model: ModelPieces
    states: list[State]  # of compression
    task: RunningProgram[None] | None = None  # the exchange; None: all pieces are there
    step: int = -1
    arrived: set[int] = field(default_factory=set)  # pieces whose arrival has been taken note of


class _GradientOfPieces(PendingGradient):
    """A backward pass whose parameters are in pieces. They arrive after it was created."""

    pieces: _Pieces
    numbers: Mapping[Bucket, int]  # of pieces

    def params_of(self, bucket: Bucket) -> Tensor:
        params = self.pieces.model.params[self.numbers[bucket]]
        assert params is not None, "its gradient is computed after it has arrived"
        return params


class ForwardOverlap:
    """The steps of one worker."""

    def __init__(self, worker: "TrainingWorker") -> None:
        self.worker = worker
        self._buckets = worker.plan.buckets()
        self._pieces: _Pieces | None = None

    async def step(self, replica: Replica, step: int) -> Replica:
        """A step on the mean gradient. Its update may be under way afterwards: see `settle`."""
        worker = self.worker
        node = worker.node
        before = self._pieces or await self._cut(replica)
        request = worker.request(replica, step)
        if before.model.whole is not None:  # it arrives there
            request = replace(request, params=before.model.whole.params)
        computation = await node.begin(request, is_open=before.task is None)
        if before.task is not None:
            await node.spawn(self._open(before, computation, request))
        following = before.model.following(self._buckets, node)
        after = _Pieces(following, list(before.states), step=step)
        backward = _GradientOfPieces(worker, replica, step, computation=computation)
        backward.pieces = before
        backward.numbers = {bucket: i for i, bucket in enumerate(self._buckets)}
        after.task = await node.spawn(self._exchange(backward, before, after))
        self._pieces = after
        result = await node.reach(computation, 0)
        # By now the forward pass has had all parameters: the exchange before this one is over.
        return replica.having(
            buffers=result.buffers, loss=result.loss, num_gradients=replica.num_gradients + 1
        )

    async def settle(self, replica: Replica) -> Replica:
        """The replica with everything that was under way."""
        pieces, self._pieces = self._pieces, None
        if pieces is None or pieces.task is None:
            return replica
        node = self.worker.node
        await node.join(pieces.task)
        for number in range(len(self._buckets)):
            await self._wait_for(pieces, number)
        model = await pieces.model.join(replica.optimizer, node)
        return replica.having(
            params=model.params, optimizer=model.optimizer, exchange=tuple(pieces.states)
        )

    async def _cut(self, replica: Replica) -> _Pieces:
        model = await cut(replica, self._buckets, self.worker.node)
        return _Pieces(model, list(replica.exchange))

    def _tag(self, step: int, number: int) -> tuple[str, int, int]:
        return ("updated", step, number)

    async def _wait_for(self, pieces: _Pieces, number: int) -> None:
        """Waits until a piece has been updated, which a message to itself says."""
        if number not in pieces.arrived:
            node = self.worker.node
            await node.recv(node.rank, self._tag(pieces.step, number))
            pieces.arrived.add(number)

    async def _open(
        self, before: _Pieces, computation: Computation, request: GradientRequest
    ) -> None:
        """Opens layer after layer of a forward pass as the pieces of the model arrive."""
        worker, layers = self.worker, self.worker.plan.profile.layers
        last = 0
        for number, layer in enumerate(layers):
            while last < len(self._buckets) and self._buckets[last].start < layer.stop:
                await self._wait_for(before, last)
                last += 1
            if number < len(layers) - 1:
                await worker.node.open(computation, number)
        params = (await before.model.join({}, worker.node)).params
        await worker.node.open(computation, len(layers) - 1, replace(request, params=params))

    async def _exchange(self, backward: PendingGradient, before: _Pieces, after: _Pieces) -> None:
        worker, plan = self.worker, self.worker.plan
        node, step = worker.node, backward.step
        number = {bucket: i for i, bucket in enumerate(self._buckets)}
        key = plan.key.at(step).private(worker.rank)
        rule, lr = at(plan.optimizer, step, plan.steps_per_epoch), plan.lr(step)

        async def reduce(bucket: Bucket, x: Tensor, gate: Gate | None = None) -> None:
            i = number[bucket]
            reduced = await worker.mean_of_bucket(bucket, x, before.states[i], key, gate)
            after.states[i] = reduced.state
            await worker.check_mean(reduced.mean, step)
            await after.model.update(i, before.model, reduced.mean, rule, lr, bucket, node)
            await node.send(node.rank, self._tag(step, i), _NOTHING)

        await plan.scheduling.exchange(backward, self._buckets, reduce)


_NOTHING = torch.empty(0)


async def step_by_bucket(worker: "TrainingWorker", replica: Replica, step: int) -> Replica:
    """Each bucket is updated as soon as its mean is there."""
    plan, node, buckets = worker.plan, worker.node, worker.buckets
    rule, lr = at(plan.optimizer, step, plan.steps_per_epoch), plan.lr(step)
    key = plan.key.at(step).private(worker.rank)
    states = list(replica.exchange)
    number = {bucket: i for i, bucket in enumerate(buckets)}
    before = await cut(replica, buckets, node)
    after = before.following(buckets, node)

    async def reduce(bucket: Bucket, x: Tensor, gate: Gate | None = None) -> None:
        i = number[bucket]
        reduced = await worker.mean_of_bucket(bucket, x, states[i], key, gate)
        states[i] = reduced.state
        await worker.check_mean(reduced.mean, step)
        await after.update(i, before, reduced.mean, rule, lr, bucket, node)

    backward = PendingGradient(worker, replica, step)
    await plan.scheduling.exchange(backward, buckets, reduce)
    model = await after.join(replica.optimizer, node)
    return evaluated(replica, backward.outcome()).having(
        params=model.params, optimizer=model.optimizer, exchange=tuple(states)
    )
