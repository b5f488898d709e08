"""One worker of a training run: where the four dimensions meet.

A `Plan` holds what all workers of a run share. A `TrainingWorker` is one rank's view of it: it
gives a synchronization algorithm its gradients, averages and updates, and is itself built from a
node, a schedule, an architecture's groups and a reducer. `training/program.py` runs it.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradwire.core.batched import elementwise
from gradwire.core.codec import Codec, State, is_finite
from gradwire.core.errors import NonFiniteError, WireError
from gradwire.core.group import Gate, concatenate
from gradwire.core.key import Key
from gradwire.core.lifted import Lifted
from gradwire.core.node import Node
from gradwire.core.protocols import Ability, Bucket, Mixing, Pulled, Replica
from gradwire.core.ramp import at
from gradwire.core.reducer import Reduced
from gradwire.core.spec import Spec
from gradwire.training.backward import (
    Accumulated,
    PendingGradient,
    PendingVector,
    add_weight_decay,
    evaluated,
)
from gradwire.training.client import ServerClient, with_dropped_step
from gradwire.training.gradient import GradientRequest, GradientResult
from gradwire.training.optimizer import clip_by_norm, clipped_update
from gradwire.training.overlap import ForwardOverlap, step_by_bucket
from gradwire.training.pieces import Whole
from gradwire.training.plan import NONFINITE, Plan, codec_of_changes
from gradwire.training.postponed import Postponed


class _StepDropped(Exception):
    """This step is dropped on every rank."""


class TrainingWorker:
    """One rank's abilities: implements `core.protocols.Worker`."""

    def __init__(self, plan: Plan, node: Node, life: float = 0.0) -> None:
        self.plan = plan
        self.node = node
        self.life = life  # its incarnation: when it joined
        self.scratch: dict[str, Any] = {}
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

    @property
    def ability(self) -> Ability:
        return self.plan.ability

    @property
    def key(self) -> Key:
        return self.plan.key

    @property
    def num_examples(self) -> tuple[int, ...]:
        return self.plan.num_examples or (self.batch_size,) * self.size

    @property
    def batch_size(self) -> int:
        return self.plan.batch_size

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def lr(self, step: int) -> float:
        return self.plan.lr(step)

    @cached_property
    def client(self) -> ServerClient:
        """The worker's side of push and pull with servers that hold the model."""
        return ServerClient(self.plan, self.node, self.life)

    @cached_property
    def mixing(self) -> Mixing:
        return self.plan.architecture.mixing(self.node, self.plan.reducer, self.plan.key)

    @cached_property
    def _overlap(self) -> ForwardOverlap:
        return ForwardOverlap(self)

    async def gradient(self, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        before = await self.accumulate(replica, step)
        result: GradientResult = await self.node.compute(before.request)
        gradient = await self.finish_mean(before.total, result.gradient)
        if not is_finite(gradient):
            if self.plan.nonfinite == "error":
                raise NonFiniteError(self._nonfinite_message(gradient, "gradient", step))
            return None, evaluated(with_dropped_step(replica), None)
        # Servers do not clip. A worker's own steps are clipped when it takes them.
        clips = self.plan.clips_locally and self.plan.synchronization.exchanges == "gradients"
        gradient = await self.ready(gradient, replica, step, clips)
        return gradient, evaluated(replica, before.outcome(result))

    async def ready(self, gradient: Tensor, replica: Replica, step: int, clips: bool) -> Tensor:
        """The gradient as exchanged: clipped and decayed, if that happens before compression."""
        plan = self.plan
        if clips and plan.clip_norm is not None:
            # The mean of n independent gradients is sqrt(n) times shorter than each.
            most = plan.clip_norm * (plan.num_workers**0.5 if plan.local_clip else 1.0)
            gradient = await self.node.call(clip_by_norm, gradient, most)
        decay = at(plan.local_decay, step, plan.steps_per_epoch)
        if decay:
            gradient = await self.node.call(add_weight_decay, gradient, replica.params, decay)
        return gradient

    async def mean_gradient(
        self, replica: Replica, step: int, *, scale: float = 1.0
    ) -> tuple[Tensor | None, Replica]:
        backward = PendingGradient(self, replica, step, scale)
        mean, exchange = await self._exchange(backward, replica, step)
        if mean is None:
            return None, evaluated(with_dropped_step(replica), None)
        return mean, evaluated(replica, backward.outcome()).having(exchange=exchange)

    async def mean_step(self, replica: Replica, step: int) -> Replica:
        if self.plan.overlaps_forward:
            return await self._overlap.step(replica, step)
        if self.plan.updates_by_bucket:
            return await step_by_bucket(self, replica, step)
        mean, replica = await self.mean_gradient(replica, step)
        if mean is None:
            return replica
        return await self.update(replica, mean, step, shared=True)

    async def settle(self, replica: Replica) -> Replica:
        """The replica when nothing of it is under way any more."""
        return await self._overlap.settle(replica) if self.plan.overlaps_forward else replica

    async def mean(
        self,
        x: Tensor,
        replica: Replica,
        step: int,
        *,
        buckets: Sequence[int] | None = None,
        members: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, Replica]:
        if members is not None and len(members) < self.size and not self.plan.reducer.can_push:
            raise ValueError(
                f"{self.plan.reducer!r} keeps what all workers must receive in every exchange, but "
                f"{self.plan.synchronization!r} has exchanges among some. Write a codec, or "
                "ef(...) around one."
            )
        backward = PendingVector(self, x, step, members)
        mean, exchange = await self._exchange(backward, replica, step, buckets, members)
        if mean is None:
            return None, with_dropped_step(replica)
        return mean, replica.having(exchange=exchange)

    async def mean_and_own(
        self, x: Tensor, replica: Replica, step: int
    ) -> tuple[Tensor | None, Tensor | None, Replica]:
        owns: dict[int, Tensor] = {}
        mean, exchange = await self._exchange(
            PendingVector(self, x, step), replica, step, owns=owns
        )
        if mean is None:
            return None, None, with_dropped_step(replica)
        pieces = [owns[i] for i in range(len(self._buckets))]
        own = pieces[0] if len(pieces) == 1 else await self.node.call(concatenate, pieces)
        return mean, own, replica.having(exchange=exchange)

    async def mean_of_some(
        self, x: Tensor, speaks: bool, replica: Replica, step: int
    ) -> tuple[Tensor, Tensor, Replica]:
        plan, states = self.plan, list(replica.exchange)
        codec = codec_of_changes(plan.reducer, plan.synchronization, step)
        key = plan.key.at(step).private(self.rank)
        means, owns = [], []
        for i, bucket in enumerate(self._buckets):
            group = plan.architecture.group(self.node, bucket.name)
            piece = x[bucket.start : bucket.stop]
            own_key = key.child(bucket.name)
            reduced = await Lifted(codec).mean_of_some(piece, speaks, states[i], own_key, group)
            states[i] = reduced.state
            means.append(reduced.mean)
            owns.append(await self.node.call(reduced.own))
        mean = means[0] if len(means) == 1 else await self.node.share(concatenate, tuple(means))
        if not await self.node.share(is_finite, mean):
            if plan.nonfinite == "error":
                raise NonFiniteError(self.foreign_nonfinite_message("the mean of changes", step))
            # As if no worker had sent a change.
            return torch.zeros_like(x), torch.zeros_like(x), with_dropped_step(replica)
        own = owns[0] if len(owns) == 1 else await self.node.call(concatenate, owns)
        return mean, own, replica.having(exchange=tuple(states))

    async def decoded(self, x: Tensor, replica: Replica, step: int) -> Tensor:
        plan = self.plan
        codec = codec_of_changes(plan.reducer, plan.synchronization, step)
        key = plan.key.at(step).private(self.rank)
        pieces = []
        for bucket, state in zip(self._buckets, replica.exchange):
            piece, own_key = x[bucket.start : bucket.stop], key.child(bucket.name)
            pieces.append(await self.node.call(_decode_own, codec, piece, state, own_key))
        return pieces[0] if len(pieces) == 1 else await self.node.call(concatenate, pieces)

    async def exact_mean(self, x: Tensor, name: str) -> Tensor:
        mean = await self.plan.architecture.group(self.node, name).mean(x)
        if not await self.node.share(is_finite, mean):
            raise NonFiniteError(self.foreign_nonfinite_message(f"the mean of {name!r}"))
        return mean

    async def fetch(self, x: Tensor, holders: Mapping[int, int], name: str) -> Tensor:
        for rank, holder in holders.items():
            if holder == self.rank:
                await self.node.send(rank, ("fetch", name), x, name)
        if self.rank not in holders:
            return x
        got = await self.node.recv(holders[self.rank], ("fetch", name))
        if Spec.of(got) != Spec.of(x):
            raise WireError(f"rank {holders[self.rank]} sent {Spec.of(got)}, not {Spec.of(x)}")
        if not await self.node.share(is_finite, got):
            raise NonFiniteError(f"rank {holders[self.rank]} sent NaN or infinity in {name!r}")
        return got

    async def push_pull(self, x: Tensor, replica: Replica, step: int) -> Pulled:
        backward = PendingVector(self, x, step)
        pushed = await self.client.push(backward, replica, step, wants_answer=True)
        return await self.client.receive_model(pushed, replica.exchange)

    async def push_pull_gradient(self, replica: Replica, step: int) -> Pulled | None:
        backward = PendingGradient(self, replica, step)
        pushed = await self.client.push(backward, replica, step, wants_answer=True)
        pushed = evaluated(pushed, None if backward.was_dropped else backward.outcome())
        return await self.client.receive_model(pushed, replica.exchange)

    async def push(self, x: Tensor, replica: Replica, step: int) -> Replica:
        return await self.client.push(
            PendingVector(self, x, step), replica, step, wants_answer=False
        )

    async def pull(self, replica: Replica, step: int) -> Pulled:
        await self.client.request_model(step)
        return await self.client.receive_model(replica, replica.exchange)

    async def update(
        self, replica: Replica, gradient: Tensor, step: int, *, shared: bool
    ) -> Replica:
        plan = self.plan
        rule, lr = at(plan.optimizer, step, plan.steps_per_epoch), plan.lr(step)
        work = self.node.share if shared else self.node.call
        clip_norm = None if plan.local_clip else plan.clip_norm
        out = None
        if self.node.is_alone:
            out = Whole.memory(len(replica.params), replica.params, replica.optimizer)
        params, optimizer = await work(
            clipped_update, rule, clip_norm, lr, replica.params, gradient, replica.optimizer, out
        )
        return replica.having(params=params, optimizer=optimizer)

    def request(self, replica: Replica, step: int, number: int = 0) -> GradientRequest:
        """For the gradient on mini-batch `number` of a step."""
        count = self.plan.accumulate
        inputs, targets = self.plan.batch(self.rank, count * step + number)
        key = self.plan.key.at(step).private(self.rank)
        if count > 1:
            key = key.child(f"mini-batch {number}")
        return GradientRequest(replica.params, replica.buffers, inputs, targets, key)

    async def accumulate(self, replica: Replica, step: int) -> Accumulated:
        """All mini-batches of a step but the last."""
        count = self.plan.accumulate
        total = loss = None
        for number in range(count - 1):
            result = await self.node.compute(self.request(replica, step, number))
            replica = replica.having(buffers=result.buffers)
            loss = result.loss if loss is None else loss + result.loss
            total = await self._add(total, result.gradient)
        return Accumulated(self.request(replica, step, count - 1), total, loss, count)

    async def _add(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        return gradient if total is None else await self.node.call(torch.add, total, gradient)

    async def finish_mean(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        """The mean gradient of all mini-batches, given the sum of all but the last."""
        if total is None:
            return gradient
        return await self.node.call(_mean_of, total, gradient, self.plan.accumulate)

    async def _exchange(
        self,
        backward: PendingGradient | PendingVector,
        replica: Replica,
        step: int,
        chosen: Sequence[int] | None = None,
        members: Sequence[int] | None = None,
        owns: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor | None, tuple[object, ...]]:
        """The mean, and the new states of compression. `owns` gets what the others decoded of
        this worker's buckets, by number."""
        plan, states = self.plan, list(replica.exchange)
        means: list[Tensor | None] = [None] * len(self._buckets)
        number = {bucket: i for i, bucket in enumerate(self._buckets)}
        buckets = self._buckets if chosen is None else [self._buckets[i] for i in chosen]
        key = plan.key.at(step).private(self.rank)
        postponed = Postponed(self)

        async def reduce(bucket: Bucket, x: Tensor, gate: Gate | None = None) -> None:
            i = number[bucket]
            if isinstance(backward, PendingGradient):  # of all workers
                postponed.add(bucket, x)
            reduced = await self.mean_of_bucket(bucket, x, states[i], key, gate, members)
            means[i], states[i] = reduced.mean, reduced.state
            if owns is not None:
                owns[i] = await self.node.call(reduced.own)

        try:
            await plan.scheduling.exchange(backward, buckets, reduce)
        except _StepDropped:
            return None, replica.exchange
        pieces = [mean for mean in means if mean is not None]
        assert len(pieces) == len(buckets), f"{plan.scheduling!r} left out a bucket"
        whole = pieces[0] if len(pieces) == 1 else await self.node.share(concatenate, tuple(pieces))
        # Received values are checked here, before the update. All have the same mean and decide
        # alike.
        if not await self.node.share(is_finite, whole):
            if plan.nonfinite != "error":
                return None, replica.exchange
            if not postponed.sent_by_another(step):
                raise NonFiniteError(self.foreign_nonfinite_message("the mean", step))
        return whole, tuple(states)

    async def mean_of_bucket(
        self,
        bucket: Bucket,
        x: Tensor,
        state: State,
        key: Key,
        gate: Gate | None = None,
        members: Sequence[int] | None = None,
    ) -> Reduced:
        """The mean of a bucket, with the new state of its compression."""
        group = self.plan.architecture.group(self.node, bucket.name, members)
        group.gate = gate
        try:
            return await self.plan.reducer.mean(x, state, key.child(bucket.name), group)
        except NonFiniteError:
            self.check_piece(x, bucket, key.step)  # its message names the tensor
            raise

    async def check_mean(self, mean: Tensor, step: int) -> None:
        """Raises unless it is finite. All have the same mean and decide alike."""
        if not await self.node.share(is_finite, mean):
            raise NonFiniteError(self.foreign_nonfinite_message("the mean", step))

    async def checked(
        self, x: Tensor, what: str, step: int, members: Sequence[int] | None = None
    ) -> Tensor:
        """x, if it is finite on every rank that must agree about it."""
        finite = is_finite(x)
        if self.plan.nonfinite == "error":
            if not finite:
                raise NonFiniteError(self._nonfinite_message(x, what, step))
        else:
            group = self.plan.architecture.group(self.node, NONFINITE, members)
            bad = await group.mean(torch.tensor([0.0 if finite else 1.0]))
            if float(bad) != 0:  # NaN counts as well: a peer may send it
                raise _StepDropped
        return x

    def check_piece(self, x: Tensor, bucket: Bucket, step: int) -> None:
        """Raises unless a part of the gradient is finite."""
        if not is_finite(x):
            raise NonFiniteError(self._nonfinite_message(x, "gradient", step, bucket.start))

    def foreign_nonfinite_message(self, what: str, step: int | None = None) -> str:
        when = "" if step is None else f" in step {step}"
        return (
            f"NaN or infinity in {what}{when} on rank {self.rank}, which sent finite values: "
            f"another rank sent it, or the sum is too large. {self._nonfinite_advice}"
        )

    def _nonfinite_message(self, x: Tensor, what: str, step: int, start: int = 0) -> str:
        where = int((~torch.isfinite(x)).nonzero()[0])
        tensor = self.plan.tensor_at(start + where)
        return (
            f"{float(x[where])} in the {what} of {tensor} on rank {self.rank} "
            f"in step {step}. {self._nonfinite_advice}"
        )

    @property
    def _nonfinite_advice(self) -> str:
        if self.plan.scheduling.overlaps:  # see `Plan._check_overlap`
            return (
                'Lower the learning rate; with scheduling "sequential" clip_norm limits gradients '
                'and nonfinite="skip" drops such steps.'
            )
        return 'Lower the learning rate or set clip_norm; nonfinite="skip" drops such steps.'


def _decode_own(codec: Codec, x: Tensor, state: State, key: Key) -> Tensor:
    return Lifted(codec).decoded(x, state, key)


@elementwise
def _mean_of(total: Tensor, gradient: Tensor, count: int) -> Tensor:
    return total.add(gradient).div_(count)
