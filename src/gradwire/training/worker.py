"""One worker of a training run: where the four dimensions meet.

A `Plan` holds what all workers of a run share. A `TrainingWorker` is one rank's view of it: it
gives a synchronization algorithm its gradients, averages and updates, and is itself built from a
node, a schedule, an architecture's groups and a reducer.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from gradwire.core.codec import Codec, State, is_finite
from gradwire.core.coded import mean_of_some
from gradwire.core.errors import GradwireWarning, NonFiniteError
from gradwire.core.group import concatenate
from gradwire.core.key import Key
from gradwire.core.lifted import Lifted, Varying
from gradwire.core.node import Framed, Node
from gradwire.core.protocols import (
    Ability,
    Architecture,
    Bucket,
    Mixing,
    Pulled,
    Replica,
    Scheduling,
    Synchronization,
    ability_of,
)
from gradwire.core.ramp import at, ramps
from gradwire.core.reducer import Outbox, Reducer
from gradwire.core.spec import Spec
from gradwire.core.wire import ANSWER, HEADER_NBYTES, REQUEST
from gradwire.training.gradient import Batch, GradientRequest, GradientResult
from gradwire.training.optimizer import Optimizer, clip_by_norm
from gradwire.training.schedule import Schedule
from gradwire.training.shards import Unit, cut_at_shards, cut_into_shards
from gradwire.training.task import Task
from gradwire.training.wire import (
    JOINING,
    AnswerHeader,
    PullHeader,
    PushHeader,
    answer_codec,
    answer_key,
    check_answers,
    learned,
)

NonFinite = Literal["error", "skip"]
Observe = Callable[[int, int, Replica, float], None]  # (rank, step, replica after it, time)


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
    # What to do with NaN and infinity. "skip": all workers drop the step together; where they push
    # to servers, each on its own, such a push is zero, and the step goes on with the others'.
    nonfinite: NonFinite = "error"
    steps_per_epoch: float | None = None  # for hyper-parameters that change with time
    num_examples: tuple[int, ...] = ()  # of each worker; empty: equally many
    batch_size: int = 1

    def __post_init__(self) -> None:
        self.reducer.check_names([tensor.name for tensor in self.task.layout.tensors])
        self.architecture.check(self.num_workers)
        if self.architecture.num_servers > self._tensors()[-1].stop:
            raise ValueError(
                f"{self.architecture!r}: the model has only {self._tensors()[-1].stop} parameters, "
                "so some servers would hold none. Take fewer servers."
            )
        self.synchronization.check(self.num_workers, len(self.buckets()))
        if self.synchronization.sends_changes:
            self._check_changes()
        if self.ability == "push_pull" and not self.reducer.one_way:
            raise ValueError(
                f"{self.reducer!r} averages in exchanges in which everyone takes part, but with "
                f"{self.synchronization!r} on {self.architecture!r} each worker pushes on its own. "
                "Write a codec, or ef(...) around one."
            )
        if self.ability == "push_pull" and ramps(self.synchronization):
            raise ValueError(
                f"{self.synchronization!r}: servers serve workers that are at different steps, so "
                "its numbers cannot change from step to step. Write constants."
            )
        if self.ability in ("mix", "mix_async"):
            (unit,) = self.units()
            spec = self.spec(unit.bucket, self.task.initial_params().dtype)
            self.architecture.check_compression(self.reducer, spec)
        if self.squeezes_answers:
            check_answers(
                self.reducer, [self.spec(shard, torch.float32) for shard in self.shards()]
            )

    @property
    def squeezes_answers(self) -> bool:
        """Whether pulled models come as compressed changes."""
        return self.ability == "push_pull" and self.architecture.squeezes_answers

    def _check_changes(self) -> None:
        """Refuses compression that cannot send changes of what was heard before."""
        codec = _codec(self.reducer, self.synchronization, 0)
        why = None
        if codec.needs_feedback:
            why = "chooses from what error feedback accumulates"
        elif codec.shares:
            why = "needs a maximum over all workers in every step, but some have nothing to say"
        if why is not None:
            raise ValueError(
                f"{codec!r} {why}: it does not go with {self.synchronization!r}. Write another "
                "codec, or bsp."
            )
        dtype = self.task.initial_params().dtype
        if not all(codec.guarantee(self.spec(b, dtype)).contracts for b in self.buckets()):
            warnings.warn(
                f"{codec!r} may lose more than there is, and {self.synchronization!r} sends again "
                "what was lost: the error can grow without bound. Take more levels, smaller "
                "buckets or a contraction such as sign or topk.",
                GradwireWarning,
                stacklevel=2,
            )

    @cached_property
    def ability(self) -> Ability:
        """What the synchronization uses of the architecture."""
        return ability_of(self.synchronization, self.architecture)

    @property
    def pauses(self) -> bool:
        """Whether between two steps all workers stand at the same step and nothing is under way."""
        rule = self.synchronization
        return rule.pauses and (self.ability != "mix" or rule.rounds_are_steps)

    def buckets(self) -> list[Bucket]:
        return self.scheduling.buckets(self._tensors())

    def shards(self) -> list[Bucket]:
        """What each server holds of the flat vector."""
        return cut_into_shards(self._tensors(), self.architecture.num_servers)

    def units(self) -> list[Unit]:
        """What is encoded in one piece: buckets, cut where shards of servers end."""
        if self.ability == "push_pull":
            return cut_at_shards(self.buckets(), self.shards())
        if self.ability == "mean":
            return [Unit(bucket) for bucket in self.buckets()]
        return [Unit(Bucket("model", 0, self._tensors()[-1].stop))]

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
        memory = {**self.synchronization.memory(params), **self.architecture.memory(params)}
        if self.squeezes_answers:
            memory["pulled"] = params  # what the servers know that the worker has
        specs = [self.spec(unit.bucket, params.dtype) for unit in self.units()]
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

    @property
    def clips_locally(self) -> bool:
        """Whether each worker clips its own gradient: servers see only shards."""
        return self.local_clip or self.ability == "push_pull"

    def lr(self, step: int) -> float:
        rule = at(self.optimizer, step, self.steps_per_epoch)
        return rule.lr * self.schedule.factor(step, self.num_steps)

    async def train(
        self,
        node: Node,
        replica: Replica,
        first: int,
        last: int,
        observe: Observe | None = None,
    ) -> Replica:
        """The program of one rank for steps first .. last - 1."""
        life = float(replica.memory.get("life", 0.0))
        return await self._steps(TrainingWorker(self, node, life), replica, first, last, observe)

    async def _steps(
        self,
        worker: "TrainingWorker",
        replica: Replica,
        first: int,
        last: int,
        observe: Observe | None,
    ) -> Replica:
        node = worker.node
        for step in range(first, last):
            synchronization = at(self.synchronization, step, self.steps_per_epoch)
            replica = await synchronization.step(worker, replica, step)
            if observe is not None:
                observe(node.rank, step, replica, await node.now())
        return replica

    async def rejoin(self, node: Node, last: int, observe: Observe | None = None) -> Replica:
        """The program of a rank that comes (back): it gets the current model, then trains."""
        replica = self.initial_replicas()[node.rank]
        worker = TrainingWorker(self, node, await node.now())
        if self.ability == "push_pull":
            life = torch.tensor(worker.life, dtype=torch.float64)
            pulled = await worker.pull(replica.remembering(life=life), JOINING)
            replica, first = await self.synchronization.resume(worker, pulled)
        elif self.ability == "mean":
            raise ValueError(
                f"rank {node.rank} cannot come back: {self.synchronization!r} on "
                f"{self.architecture!r} needs all workers from beginning to end. "
                "Try ssp or asp on parameter_server, or gossip."
            )
        else:
            replica, first = await worker.mixing.rejoin(replica)
        return await self._steps(worker, replica, first, last, observe)


class _Dropped(Exception):
    """This step is dropped on every rank."""


class TrainingWorker:
    """One rank's abilities, as `core.protocols.Worker` has them."""

    def __init__(self, plan: Plan, node: Node, life: float = 0.0) -> None:
        self.plan = plan
        self.node = node
        self.life = life  # when it came (back)
        self.scratch: dict[str, Any] = {}
        self._buckets = plan.buckets()
        self._shards = plan.shards() if plan.ability == "push_pull" else []
        self._units = plan.units()

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
    def mixing(self) -> Mixing:
        return self.plan.architecture.mixing(self.node, self.plan.reducer, self.plan.key)

    async def gradient(self, replica: Replica, step: int) -> tuple[Tensor | None, Replica]:
        result = await self._evaluated(replica, step)
        if not is_finite(result.gradient):
            if self.plan.nonfinite == "error":
                raise NonFiniteError(self._complaint(result.gradient, "gradient", step))
            return None, _dropping(replica)
        # Servers do not clip; steps of its own a worker clips when it takes them.
        clips = self.plan.clips_locally and self.plan.synchronization.exchanges == "gradients"
        gradient = await self.ready(result.gradient, replica, step, clips)
        return gradient, _evaluated(replica, result)

    async def ready(self, gradient: Tensor, replica: Replica, step: int, clips: bool) -> Tensor:
        """A gradient as it is exchanged: clipped and with weight decay, where that comes before."""
        plan = self.plan
        if clips and plan.clip_norm is not None:
            # The mean of n independent gradients is sqrt(n) times shorter than each.
            most = plan.clip_norm * (plan.num_workers**0.5 if plan.local_clip else 1.0)
            gradient = await self.node.call(clip_by_norm, gradient, most)
        decay = at(plan.local_decay, step, plan.steps_per_epoch)
        if decay:
            gradient = await self.node.call(_decaying, gradient, replica.params, decay)
        return gradient

    async def mean_gradient(
        self, replica: Replica, step: int, *, scale: float = 1.0
    ) -> tuple[Tensor | None, Replica]:
        backward = _Gradient(self, replica, step, scale)
        mean, exchange = await self._exchange(backward, replica, step)
        if mean is None:
            return None, _dropping(replica)
        assert backward.result is not None
        return mean, _evaluated(replica, backward.result).having(exchange=exchange)

    async def mean(
        self,
        x: Tensor,
        replica: Replica,
        step: int,
        *,
        buckets: Sequence[int] | None = None,
        members: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, Replica]:
        if members is not None and len(members) < self.size and not self.plan.reducer.one_way:
            raise ValueError(
                f"{self.plan.reducer!r} keeps what all workers must hear in every exchange, but "
                f"{self.plan.synchronization!r} has exchanges among some. Write a codec, or "
                "ef(...) around one."
            )
        backward = _Vector(self, x, step, members)
        mean, exchange = await self._exchange(backward, replica, step, buckets, members)
        if mean is None:
            return None, _dropping(replica)
        return mean, replica.having(exchange=exchange)

    async def mean_of_some(
        self, x: Tensor, speaks: bool, replica: Replica, step: int
    ) -> tuple[Tensor, Tensor, Replica]:
        plan, states = self.plan, list(replica.exchange)
        codec = _codec(plan.reducer, plan.synchronization, step)
        key = plan.key.at(step).private(self.rank)
        means, owns = [], []
        for i, bucket in enumerate(self._buckets):
            group = plan.architecture.group(self.node, bucket.name)
            piece = x[bucket.start : bucket.stop]
            own_key = key.child(bucket.name)
            reduced = await mean_of_some(codec, piece, speaks, states[i], own_key, group)
            states[i] = reduced.state
            means.append(reduced.mean)
            owns.append(await self.node.call(reduced.own))
        replica = replica.having(exchange=tuple(states))
        if len(means) == 1:
            return means[0], owns[0], replica
        mean = await self.node.share(concatenate, tuple(means))
        return mean, await self.node.call(concatenate, owns), replica

    async def heard(self, x: Tensor, replica: Replica, step: int) -> Tensor:
        plan = self.plan
        codec = _codec(plan.reducer, plan.synchronization, step)
        key = plan.key.at(step).private(self.rank)
        pieces = []
        for bucket, state in zip(self._buckets, replica.exchange):
            piece, own_key = x[bucket.start : bucket.stop], key.child(bucket.name)
            pieces.append(await self.node.call(_heard, codec, piece, state, own_key))
        return pieces[0] if len(pieces) == 1 else await self.node.call(concatenate, pieces)

    async def exact_mean(self, x: Tensor, name: str) -> Tensor:
        return await self.plan.architecture.group(self.node, name).mean(x)

    async def fetch(self, x: Tensor, holders: Mapping[int, int], name: str) -> Tensor:
        for rank, holder in holders.items():
            if holder == self.rank:
                await self.node.send(rank, ("fetch", name), x, name)
        if self.rank not in holders:
            return x
        return await self.node.recv(holders[self.rank], ("fetch", name))

    async def push_pull(self, x: Tensor, replica: Replica, step: int) -> Pulled:
        pushed = await self._push(_Vector(self, x, step), replica, step, wants_answer=True)
        return await self._pulled(pushed, replica.exchange)

    async def push_pull_gradient(self, replica: Replica, step: int) -> Pulled | None:
        backward = _Gradient(self, replica, step)
        pushed = await self._push(backward, replica, step, wants_answer=True)
        assert backward.result is not None
        if backward.was_dropped:  # its statistics and its loss are not finite either
            pushed = pushed.having(num_gradients=pushed.num_gradients + 1)
        else:
            pushed = _evaluated(pushed, backward.result)
        return await self._pulled(pushed, replica.exchange)

    async def push(self, x: Tensor, replica: Replica, step: int) -> Replica:
        return await self._push(_Vector(self, x, step), replica, step, wants_answer=False)

    async def pull(self, replica: Replica, step: int) -> Pulled:
        for server in range(len(self._shards)):
            header = PullHeader(step, self.life)
            await self.node.send_framed(
                self._server(server), REQUEST, Framed(header), HEADER_NBYTES, "pull"
            )
        return await self._pulled(replica, replica.exchange)

    def _server(self, number: int) -> int:
        """The rank of a server."""
        return self.size + number

    async def _push(
        self, backward: "_Gradient | _Vector", replica: Replica, step: int, wants_answer: bool
    ) -> Replica:
        """Sends each piece to its server when its bucket is ready."""
        plan, states = self.plan, list(replica.exchange)
        key = plan.key.at(step).private(self.rank)

        def turn(number: int) -> int:
            # All begin with another server, so that none is idle while others are asked by all.
            return (self._units[number].server - self.rank) % len(self._shards)

        async def reduce(bucket: Bucket, x: Tensor) -> None:
            pieces = [i for i, unit in enumerate(self._units) if unit.lies_in(bucket)]
            for i in sorted(pieces, key=turn):
                unit, piece = self._units[i], self._units[i].bucket
                outbox = Outbox(self.node, piece.name)
                own = x[piece.start - bucket.start : piece.stop - bucket.start]
                reduced = await plan.reducer.mean(own, states[i], key.child(piece.name), outbox)
                states[i] = reduced.state
                num_parts = len(outbox.messages)
                for part, message in enumerate(outbox.messages):
                    header = PushHeader(i, part, num_parts, step, wants_answer, self.life)
                    await self.node.send_framed(
                        self._server(unit.server),
                        REQUEST,
                        Framed(header, message),
                        HEADER_NBYTES,
                        bucket.name,
                    )

        await plan.scheduling.exchange(backward, self._buckets, reduce)
        if backward.was_dropped:
            replica = _dropping(replica)
        return replica.having(exchange=tuple(states))

    async def _pulled(self, replica: Replica, before: tuple[State, ...]) -> Pulled:
        """Waits for the answers of all servers.

        A server that did not accept the push leaves what compression keeps as it was `before`:
        nothing is lost of what was fed back.
        """
        plan, pieces, clocks = self.plan, [], []
        states, accepted = list(replica.exchange), True
        for server, shard in enumerate(self._shards):
            header, message = await self._answer(self._server(server))
            clocks.append(header.clock)
            if not header.accepted:
                accepted = False
                for i, unit in enumerate(self._units):
                    if unit.server == server:
                        states[i] = before[i]
            piece = message
            if not header.is_whole:
                known = replica.memory["pulled"][shard.start : shard.stop]
                spec = plan.spec(shard, known.dtype)
                key = answer_key(plan.key, header.number, self.rank, server)
                codec = answer_codec(plan.reducer, header.clock)
                piece = await self.node.call(learned, codec, known, piece, spec, key)
            pieces.append(piece)
        # Workers that keep step get the same objects; others would only fill the memory.
        work = self.node.share if plan.synchronization.pauses else self.node.call
        whole = pieces[0] if len(pieces) == 1 else await work(concatenate, tuple(pieces))
        replica = replica.having(params=whole, exchange=tuple(states))
        if plan.squeezes_answers:
            replica = replica.remembering(pulled=whole)
        return Pulled(replica, min(clocks), accepted, max(clocks))

    async def _answer(self, server: int) -> tuple[AnswerHeader, Tensor]:
        """The next answer of a server that is not for who this worker was before it came back."""
        while True:
            message = await self.node.recv(server, ANSWER)
            assert isinstance(message, Framed)
            assert isinstance(message.header, AnswerHeader)
            assert message.data is not None
            if message.header.life == self.life:
                return message.header, message.data

    async def update(
        self, replica: Replica, gradient: Tensor, step: int, *, shared: bool
    ) -> Replica:
        plan = self.plan
        rule, lr = at(plan.optimizer, step, plan.steps_per_epoch), plan.lr(step)
        work = self.node.share if shared else self.node.call
        clip_norm = None if plan.local_clip else plan.clip_norm
        params, optimizer = await work(
            update, rule, clip_norm, lr, replica.params, gradient, replica.optimizer
        )
        return replica.having(params=params, optimizer=optimizer)

    async def _evaluated(self, replica: Replica, step: int) -> GradientResult:
        inputs, targets = self.plan.batch(self.rank, step)
        key = self.plan.key.at(step).private(self.rank)
        request = GradientRequest(replica.params, replica.buffers, inputs, targets, key)
        result: GradientResult = await self.node.compute(request)
        return result

    async def _exchange(
        self,
        backward: "_Gradient | _Vector",
        replica: Replica,
        step: int,
        chosen: Sequence[int] | None = None,
        members: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, tuple[object, ...]]:
        plan, states = self.plan, list(replica.exchange)
        means: list[Tensor | None] = [None] * len(self._buckets)
        number = {bucket: i for i, bucket in enumerate(self._buckets)}
        buckets = self._buckets if chosen is None else [self._buckets[i] for i in chosen]
        key = plan.key.at(step).private(self.rank)

        async def reduce(bucket: Bucket, x: Tensor) -> None:
            i = number[bucket]
            group = plan.architecture.group(self.node, bucket.name, members)
            reduced = await plan.reducer.mean(x, states[i], key.child(bucket.name), group)
            means[i], states[i] = reduced.mean, reduced.state

        try:
            await plan.scheduling.exchange(backward, buckets, reduce)
        except _Dropped:
            return None, replica.exchange
        pieces = [mean for mean in means if mean is not None]
        assert len(pieces) == len(buckets), f"{plan.scheduling!r} left out a bucket"
        whole = pieces[0] if len(pieces) == 1 else await self.node.share(concatenate, tuple(pieces))
        return whole, tuple(states)

    async def checked(
        self, x: Tensor, what: str, step: int, members: Sequence[int] | None = None
    ) -> Tensor:
        """x, if it is finite on every rank that must agree about it."""
        finite = is_finite(x)
        if self.plan.nonfinite == "error":
            if not finite:
                raise NonFiniteError(self._complaint(x, what, step))
        else:
            group = self.plan.architecture.group(self.node, "nonfinite", members)
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

    def __init__(
        self, worker: TrainingWorker, replica: Replica, step: int, scale: float = 1.0
    ) -> None:
        self.worker = worker
        self.replica = replica
        self.step = step
        self.scale = scale
        self.result: GradientResult | None = None
        self.was_dropped = False

    async def whole(self) -> Tensor:
        worker, plan = self.worker, self.worker.plan
        self.result = await worker._evaluated(self.replica, self.step)
        gradient = self.result.gradient
        if plan.ability == "push_pull" and plan.nonfinite == "skip":
            # Servers wait for something, and nobody else knows: nothing is what it says.
            if not is_finite(gradient):
                self.was_dropped = True
                return torch.zeros_like(gradient)
        else:
            gradient = await worker.checked(gradient, "gradient", self.step)
        gradient = await worker.ready(gradient, self.replica, self.step, plan.clips_locally)
        if self.scale != 1.0:
            gradient = await worker.node.call(torch.mul, gradient, self.scale)
        return gradient


class _Vector:
    """A vector that is already there, where a schedule expects a backward pass."""

    def __init__(
        self,
        worker: TrainingWorker,
        x: Tensor,
        step: int,
        members: Sequence[int] | None = None,
    ) -> None:
        self.worker = worker
        self.x = x
        self.step = step
        self.members = members
        self.was_dropped = False

    async def whole(self) -> Tensor:
        worker = self.worker
        if worker.ability == "push_pull" and worker.plan.nonfinite == "skip":
            # As with gradients: nothing is what it says.
            self.was_dropped = not is_finite(self.x)
            return torch.zeros_like(self.x) if self.was_dropped else self.x
        return await worker.checked(self.x, "update", self.step, self.members)


def _evaluated(replica: Replica, result: GradientResult) -> Replica:
    """After a gradient."""
    count = replica.num_gradients + 1
    return replica.having(buffers=result.buffers, loss=result.loss, num_gradients=count)


def _codec(reducer: Reducer, synchronization: Synchronization, step: int) -> Codec:
    if isinstance(reducer, Varying):
        reducer = reducer.at(step)
    if isinstance(reducer, Lifted):
        return reducer.codec
    raise ValueError(
        f"{synchronization!r} sends differences to what was heard before, which is a feedback of "
        f"its own: write a codec as compression, not {reducer!r}."
    )


def _heard(codec: Codec, x: Tensor, state: State, key: Key) -> Tensor:
    spec = replace(Spec.of(x), tensors=state.get("tensors", ()))
    payload, _ = codec.encode(x, state["codec"], key)
    return codec.decode(payload, spec, key)


def _dropping(replica: Replica) -> Replica:
    return replica.having(num_dropped=replica.num_dropped + 1)


def _decaying(gradient: Tensor, params: Tensor, decay: float) -> Tensor:
    return gradient.add(params, alpha=decay)


def update(
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
