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

from gradwire.core.codec import State, is_finite
from gradwire.core.errors import NonFiniteError
from gradwire.core.group import Gate, concatenate
from gradwire.core.node import Computation, RunningProgram
from gradwire.core.protocols import Bucket, Replica
from gradwire.core.ramp import at
from gradwire.training.backward import PendingGradient
from gradwire.training.gradient import GradientRequest
from gradwire.training.optimizer import Optimizer

if TYPE_CHECKING:
    from gradwire.training.worker import TrainingWorker

OptimizerState = dict[str, Tensor]


@dataclass(slots=True)
class _Pieces:
    """A model in pieces, some of which may still be under way."""

    params: list[Tensor]
    optimizer: list[OptimizerState]
    states: list[State]  # of compression
    task: RunningProgram[None] | None = None  # the exchange; None: all pieces are there
    step: int = -1
    arrived: set[int] = field(default_factory=set)  # pieces whose arrival has been taken note of


class _GradientOfPieces(PendingGradient):
    """A backward pass whose parameters are in pieces. They arrive after it was created."""

    pieces: _Pieces
    numbers: Mapping[Bucket, int]  # of pieces

    def params_of(self, bucket: Bucket) -> Tensor:
        return self.pieces.params[self.numbers[bucket]]


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
        computation = await node.begin(request, is_open=before.task is None)
        if before.task is not None:
            await node.spawn(self._open(before, computation, request))
        after = _Pieces(list(before.params), list(before.optimizer), list(before.states), step=step)
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
        params = await node.share(concatenate, tuple(pieces.params))
        optimizer = {
            name: await node.share(_join, tuple(own[name] for own in pieces.optimizer))
            for name in replica.optimizer
        }
        return replica.having(params=params, optimizer=optimizer, exchange=tuple(pieces.states))

    async def _cut(self, replica: Replica) -> _Pieces:
        node = self.worker.node
        sizes = tuple(bucket.numel for bucket in self._buckets)
        params = await node.share(_split, replica.params, sizes)
        named = {
            name: await node.share(_split, value, sizes)
            for name, value in replica.optimizer.items()
        }
        optimizer = [{name: own[i] for name, own in named.items()} for i in range(len(sizes))]
        return _Pieces(list(params), optimizer, list(replica.exchange))

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
        params = await worker.node.share(concatenate, tuple(before.params))
        await worker.node.open(computation, len(layers) - 1, replace(request, params=params))

    async def _exchange(self, backward: PendingGradient, before: _Pieces, after: _Pieces) -> None:
        worker, plan = self.worker, self.worker.plan
        node, step = worker.node, backward.step
        number = {bucket: i for i, bucket in enumerate(self._buckets)}
        key = plan.key.at(step).private(worker.rank)
        rule, lr = at(plan.optimizer, step, plan.steps_per_epoch), plan.lr(step)

        async def reduce(bucket: Bucket, x: Tensor, gate: Gate | None = None) -> None:
            i = number[bucket]
            group = plan.architecture.group(node, bucket.name)
            group.gate = gate
            reduced = await plan.reducer.mean(x, before.states[i], key.child(bucket.name), group)
            if not await node.share(is_finite, reduced.mean):
                raise NonFiniteError(worker.foreign_nonfinite_message("the mean", step))
            params, optimizer = await node.share(
                update_piece, rule, lr, before.params[i], reduced.mean, before.optimizer[i]
            )
            after.params[i], after.optimizer[i] = params, optimizer
            after.states[i] = reduced.state
            await node.send(node.rank, self._tag(step, i), _NOTHING)

        await plan.scheduling.exchange(backward, self._buckets, reduce)


_NOTHING = torch.empty(0)


def _split(x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """A vector in pieces; a number, such as a count of steps, is in each."""
    return x.split(sizes) if x.dim() else (x,) * len(sizes)


def _join(pieces: tuple[Tensor, ...]) -> Tensor:
    return concatenate(pieces) if pieces[0].dim() else pieces[0]


def update_piece(
    rule: Optimizer, lr: float, params: Tensor, gradient: Tensor, state: OptimizerState
) -> tuple[Tensor, OptimizerState]:
    return rule.update(params, gradient, state, lr)
