"""The plan of a run: task, optimizer and the four dimensions, shared by all workers and servers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from gradwire.core.codec import Algebra, Codec, Kind
from gradwire.core.errors import GradwireWarning
from gradwire.core.group import is_half
from gradwire.core.key import Key
from gradwire.core.layout import NodeLayout
from gradwire.core.lifted import Lifted
from gradwire.core.limits import Limits
from gradwire.core.profile import Profile, layers_of
from gradwire.core.protocols import (
    Ability,
    Architecture,
    Bucket,
    Replica,
    Scheduling,
    Synchronization,
    ability_of,
)
from gradwire.core.ramp import at, ramps
from gradwire.core.reducer import Reducer, remembering
from gradwire.core.spec import Spec
from gradwire.training.gradient import Batch
from gradwire.training.optimizer import Optimizer
from gradwire.training.schedule import Schedule
from gradwire.training.shards import Unit, cut_at_shards, cut_into_shards
from gradwire.training.task import Task
from gradwire.training.wire import check_answers

NonFinite = Literal["error", "skip"]
NONFINITE = "nonfinite"  # the label under which workers agree on whether a step is dropped


@dataclass(frozen=True)
class Plan:
    """What is trained and how; equal on every rank."""

    task: Task
    batch: Callable[[int, int], Batch]  # (rank, number) -> mini-batch; `accumulate` in a step
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
    # How NaN and infinity are handled. "skip": all workers drop the step together; where each
    # worker pushes to servers, it pushes zeros, and the step continues with the other workers.
    nonfinite: NonFinite = "error"
    steps_per_epoch: float | None = None  # for hyper-parameters that change with time
    num_examples: tuple[int, ...] = ()  # of each worker; empty: equally many
    batch_size: int = 1
    accumulate: int = 1  # mini-batches whose mean gradient is exchanged
    # How the time of a gradient divides among layers; None: equally among their parameters.
    layer_profile: Profile | None = None

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
        if self.synchronization.keeps_unsent:
            self._check_unsent()
        if self.ability == "push_pull" and not self.reducer.can_push:
            raise ValueError(
                f"{self.reducer!r} averages in exchanges in which all workers take part, but with "
                f"{self.synchronization!r} on {self.architecture!r} each worker pushes on its own. "
                "Write a codec, or ef(...) around one."
            )
        if self.ability == "push_pull" and ramps(self.synchronization):
            raise ValueError(
                f"{self.synchronization!r}: servers serve workers that are at different steps, so "
                "its numbers cannot change from step to step. Write constants."
            )
        if self.scheduling.overlaps:
            self._check_overlap()
        if self.mixes:
            (unit,) = self.units()
            spec = self.spec(unit.bucket, self.task.initial_params().dtype)
            self.architecture.check_compression(self.reducer, spec)
        if self.compresses_answers:
            check_answers(
                self.reducer, [self.spec(shard, torch.float32) for shard in self.shards()]
            )

    @property
    def compresses_answers(self) -> bool:
        """Whether pulled models come as compressed changes."""
        return self.ability == "push_pull" and self.architecture.compresses_answers

    def _check_overlap(self) -> None:
        """Refuses what needs the whole gradient before a part of it is sent."""
        why = None
        if self.mixes:
            why = f"{self.architecture!r} averages models after a step, not parts of gradients"
        elif self.nonfinite == "skip":
            why = 'nonfinite="skip" drops a step before anything of it is sent'
        elif self.clip_norm is not None and self.clips_locally:
            why = "each worker clips its gradient by the norm of the whole of it"
        elif self.synchronization.sends_changes:
            why = f"{self.synchronization!r} decides by the whole gradient whether to send it"
        elif self.overlaps_forward and self.clip_norm is not None:
            why = "clip_norm needs the norm of the whole mean before the first layer is updated"
        elif self.overlaps_forward and not self.optimizer.is_elementwise:
            why = f"{self.optimizer!r} does not update each element by itself"
        if why is not None:
            raise ValueError(
                f"{self.scheduling!r} sends parts of a gradient before the others are computed, "
                f'but {why}. Take scheduling "sequential".'
            )

    def _check_changes(self) -> None:
        """Refuses compression that cannot send changes relative to the values decoded before."""
        codec = codec_of_changes(self.reducer, self.synchronization, 0)
        why = None
        if codec.traits.needs_feedback:
            why = "chooses from what error feedback accumulates"
        elif codec.traits.statistic is not None:
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

    def _check_unsent(self) -> None:
        """Refuses compression that keeps for the next exchange what the model keeps already."""
        keeper = remembering(self.reducer)
        if keeper is not None:
            raise ValueError(
                f"{self.synchronization!r} leaves in each worker's model what is not sent, and "
                f"{keeper!r} keeps it as well: it would be sent twice. Write a codec without "
                'feedback, or unsent="reset".'
            )

    @property
    def mixes(self) -> bool:
        """Whether workers average with neighbours, so that each has a model of its own."""
        return self.ability in ("mix", "mix_async")

    @cached_property
    def ability(self) -> Ability:
        """What the synchronization uses of the architecture."""
        return ability_of(self.synchronization, self.architecture)

    @property
    def pauses(self) -> bool:
        """Whether all workers are at the same step between steps, with no message in flight."""
        rule = self.synchronization
        return rule.pauses and (self.ability != "mix" or rule.rounds_are_steps)

    @property
    def layout(self) -> NodeLayout:
        """The roles of all nodes."""
        return self.architecture.layout(self.num_workers)

    @property
    def overlaps_forward(self) -> bool:
        """Whether a forward pass may start before the model of the last step is whole."""
        is_mean = self.ability == "mean" and self.synchronization.steps_on_mean
        return self.scheduling.overlaps_forward and is_mean and self.accumulate == 1

    @cached_property
    def encoding_checks(self) -> bool:
        """Whether encoding a gradient finds NaN in it, so that no other pass has to look for it."""
        is_clipped = self.clips_locally and self.clip_norm is not None
        only_averaged = self.ability == "mean" and self.nonfinite == "error"
        # Sums of 16-bit gradients and residuals saturate, which would hide infinity.
        is_wide = not is_half(self.task.initial_params())
        return only_averaged and is_wide and not is_clipped and self.reducer.checks_input

    @cached_property
    def mean_shows_all(self) -> bool:
        """Whether a mean of gradients is finite only if all are: they are added as they are."""
        if not self.encoding_checks or not isinstance(self.reducer, Lifted):
            return False
        params, codec = self.task.initial_params(), self.reducer.codec
        is_plain = codec.traits.statistic is None and codec.leaves is Kind.REAL
        is_added = codec.algebra is Algebra.LINEAR and codec.parts == ("values",)
        return is_plain and is_added and codec.guarantee(Spec.of(params)).delta == 1.0

    @cached_property
    def updates_by_bucket(self) -> bool:
        """Whether a bucket is updated as soon as its mean is there, before the others."""
        is_mean = self.ability == "mean" and self.synchronization.steps_on_mean
        may = self.clip_norm is None and self.optimizer.is_elementwise
        return self.scheduling.overlaps and is_mean and may

    @cached_property
    def profile(self) -> Profile:
        if self.layer_profile is not None:
            return self.layer_profile
        layers = layers_of(self._tensors())
        numels = tuple(float(layer.numel) for layer in layers)
        return Profile(layers, numels, tuple(2 * numel for numel in numels))

    def buckets(self) -> list[Bucket]:
        return self.scheduling.buckets(self._tensors(), self.profile)

    def shards(self) -> list[Bucket]:
        """The shard of the flat vector that each server holds."""
        return cut_into_shards(self._tensors(), self.architecture.num_servers)

    def units(self) -> list[Unit]:
        """The units that are encoded separately: buckets, cut at the ends of shards."""
        if self.ability == "push_pull":
            return cut_at_shards(self.buckets(), self.shards())
        if self.ability == "mean":
            return [Unit(bucket) for bucket in self.buckets()]
        return [Unit(Bucket("model", 0, self._tensors()[-1].stop))]

    def limits(self) -> Limits:
        """The tensors that workers exchange through servers that form means, and their sizes."""
        params = self.task.initial_params()
        numels = {bucket.name: bucket.numel for bucket in self.buckets()}
        # Besides buckets: whether a step is dropped, and vectors of the optimizer.
        numels[NONFINITE] = max(1, numels.get(NONFINITE, 0))
        numels |= dict.fromkeys(self.optimizer.init(params), params.numel())
        return Limits(numels, max(params.element_size(), torch.float32.itemsize))

    def tensor_at(self, position: int) -> str:
        """The name of the model's tensor that holds this element of the flat vector."""
        return next(tensor.name for tensor in self._tensors() if position < tensor.stop)

    def _tensors(self) -> list[Bucket]:
        return [Bucket(t.name, t.start, t.stop) for t in self.task.layout.tensors]

    def spec(self, bucket: Bucket, dtype: torch.dtype) -> Spec:
        """The spec of a bucket for reducers: its size, and the tensors in it."""
        tensors = []
        for name, start, stop, shape in self.task.layout.tensors:
            first, last = max(start, bucket.start), min(stop, bucket.stop)
            if first < last:
                whole = (first, last) == (start, stop)  # a piece of a matrix is a vector
                placed = (first - bucket.start, last - bucket.start)
                tensors.append((name, *placed, shape if whole else (last - first,)))
        return Spec((bucket.numel,), dtype, tensors=tuple(tensors))

    def initial_replicas(self) -> list[Replica]:
        """One replica per worker. All share the same tensors until updates replace them."""
        params = self.task.initial_params()
        buffers = self.task.initial_buffers()
        optimizer = self.optimizer.init(params)
        memory = {**self.synchronization.memory(params), **self.architecture.memory(params)}
        if self.compresses_answers:
            memory["pulled"] = params  # the model that servers know this worker to have
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


def codec_of_changes(reducer: Reducer, synchronization: Synchronization, step: int) -> Codec:
    """The codec of differences to what was decoded before."""
    codec = reducer.codec_at(step)
    if codec is not None:
        return codec
    raise ValueError(
        f"{synchronization!r} sends differences to what was decoded before, which is a feedback of "
        f"its own: write a codec as compression, not {reducer!r}."
    )
