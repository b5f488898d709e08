"""Buckets of a model's parameters, which leave when all their gradients are there.

`Buckets` divides parameters as a schedule says, as in simulated runs: flat vectors in the order of
the parameters, one for each dtype and device. A hook on each parameter notes when its gradient is
there; buckets leave in one order on all ranks, last one first, whatever order gradients come in. At
the end of the backward pass those that are left leave as well, with zeros for parameters without a
gradient; then all means are awaited, and become the gradients.
"""

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import Variable

from gradwire.core.profile import Profile, layers_of
from gradwire.core.protocols import Scheduling
from gradwire.core.replica import Bucket
from gradwire.integration.exchange import Exchange, Layout
from gradwire.integration.measuring import Measuring
from gradwire.integration.names import rows_of
from gradwire.integration.stats import Meter
from gradwire.scheduling.sequential import Sequential

Named = Sequence[tuple[str, Tensor]]


@dataclass
class ParameterBucket:
    """Parameters whose gradients are exchanged together."""

    name: str
    parameters: list[Tensor]
    layout: Layout
    num_missing: int = 0  # parameters whose gradient is not there yet
    future: "Future[Tensor] | None" = field(default=None, repr=False)

    def gradient(self) -> Tensor:
        """All gradients as one vector; those that are missing are zero."""
        parts = []
        for parameter in self.parameters:
            grad = parameter.grad
            parts.append(torch.zeros_like(parameter) if grad is None else grad)
        if len(parts) == 1:
            return parts[0].detach().reshape(-1)
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def take(self, mean: Tensor) -> None:
        """The mean becomes the gradient of the parameters."""
        for parameter, (_, start, stop, shape) in zip(self.parameters, self.layout):
            if not parameter.requires_grad:  # it was frozen meanwhile
                continue
            own = mean[start:stop].view(shape)
            if parameter.grad is None or parameter.grad.is_contiguous():
                parameter.grad = own
            else:  # keep its memory format
                parameter.grad.copy_(own)


ProfileOf = Callable[[Sequence[Bucket]], Profile]


def assumed_profile(tensors: Sequence[Bucket]) -> Profile:
    """Layers take times in proportion to their parameters."""
    layers = layers_of(tensors)
    numels = tuple(float(layer.numel) for layer in layers)
    return Profile(layers, numels, tuple(2 * numel for numel in numels))


def cut_into_buckets(
    named: Named, scheduling: Scheduling, profile_of: ProfileOf = assumed_profile
) -> list[ParameterBucket]:
    """The buckets of a schedule, in the order of the parameters."""
    kinds = _kinds(named)
    made = []
    for (dtype, device), own in kinds.items():
        prefix = "" if len(kinds) == 1 else f"{dtype} {device} "
        made += _buckets_of(own, scheduling, profile_of, prefix)
    return made


def check_outermost() -> None:
    """Raises in a backward pass inside another one: it would be taken for a whole one.

    Checkpoints with use_reentrant=True call `backward` in the backward pass.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == torch.utils.checkpoint.__name__:
            raise RuntimeError(
                "the first gradient of this backward pass comes from a checkpoint with "
                "use_reentrant=True, which is a backward pass of its own, so gradients would be "
                "exchanged several times. Write checkpoint(..., use_reentrant=False)"
            )
        frame = frame.f_back


def _tensors_of(named: Named) -> list[Bucket]:
    tensors, start = [], 0
    for name, parameter in named:
        tensors.append(Bucket(name, start, start + parameter.numel()))
        start += parameter.numel()
    return tensors


def _kinds(named: Named) -> dict[Any, list[tuple[str, Tensor]]]:
    """By dtype and device: what may be in one bucket."""
    kinds: dict[Any, list[tuple[str, Tensor]]] = {}
    for name, parameter in named:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    return kinds


def _buckets_of(
    named: Named, scheduling: Scheduling, profile_of: ProfileOf, prefix: str
) -> list[ParameterBucket]:
    tensors = _tensors_of(named)
    made = []
    for bucket in scheduling.buckets(tensors, profile_of(tensors)):
        inside = [
            (tensor, parameter)
            for tensor, (_, parameter) in zip(tensors, named)
            if bucket.start <= tensor.start < bucket.stop
        ]
        layout = tuple(
            (t.name, t.start - bucket.start, t.stop - bucket.start, tuple(p.shape))
            for t, p in inside
        )
        made.append(ParameterBucket(prefix + bucket.name, [p for _, p in inside], layout))
    return made


class BucketExchange:
    """Exchanges gradients while the backward pass runs.

    `overlaps`: a bucket leaves as soon as it is complete, not at the end of the backward pass.
    `num_passes`: backward passes whose gradients add up before they are exchanged.
    `sums`: gradients become the sum over all ranks, not the mean.
    """

    def __init__(
        self,
        named: Named,
        scheduling: Scheduling,
        make_exchange: Callable[[torch.device], Exchange],
        *,
        num_passes: int = 1,
        densifies: bool = False,
        sums: bool = False,
    ) -> None:
        self.named = list(named)
        self.scheduling = scheduling
        self._measuring = Measuring(self.named) if scheduling.needs_prices else None
        self._make_exchange = make_exchange
        self._num_passes = num_passes
        self._densifies = densifies
        self._sums = sums
        self.exchange: Exchange | None = None
        self.meter = Meter()
        self._names = {id(parameter): name for name, parameter in named}
        self._take_buckets(
            cut_into_buckets(self.named, Sequential() if self._measuring else scheduling)
        )
        self._num_seen: dict[int, int] = {}  # gradients of each parameter since the last exchange
        self._num_done = 0  # backward passes since the last exchange
        self._at_end: weakref.ref[Any] | None = None  # autograd holds it during a backward pass
        self._next = len(self._buckets) - 1  # the bucket that leaves next
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
            for _, parameter in self.named
        ]
        self._reset()

    @property
    def layouts(self) -> list[Layout]:
        """The tensors of each bucket."""
        return [bucket.layout for bucket in self._buckets]

    def described(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        return {
            "scheduling": repr(self.scheduling),
            "backward_passes_per_step": self._num_passes,
            "op": "sum" if self._sums else "average",
            "parameters": rows_of(self.named),
        }

    def _take_buckets(self, buckets: list[ParameterBucket]) -> None:
        self._buckets = buckets
        self._bucket_of = {id(p): b for b in buckets for p in b.parameters}

    def __contains__(self, key: object) -> bool:
        """Whether the parameter with this id is exchanged."""
        return key in self._bucket_of

    def take_over(self, other: "BucketExchange") -> None:
        """Continues what another one did, with the parameters of this one."""
        self.exchange, self.meter = other.exchange, other.meter
        if self.exchange is not None:
            self.exchange.agree_on(self.described())

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _reset(self) -> None:
        self._num_seen.clear()
        self._num_done = 0
        self._next = len(self._buckets) - 1
        for bucket in self._buckets:
            bucket.num_missing, bucket.future = len(bucket.parameters), None

    def _gradient_is_there(self, parameter: Tensor) -> None:
        if self._at_end is not None and self._at_end() is None:
            self._forget_interrupted()
        if self._at_end is None:
            check_outermost()

            def at_end() -> None:
                self._end_of_backward()

            self._at_end = weakref.ref(at_end)
            Variable._execution_engine.queue_callback(at_end)
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._densify(parameter)
        bucket, key = self._bucket_of[id(parameter)], id(parameter)
        if bucket.future is not None:
            self._check_alive()
            raise RuntimeError(
                f"another gradient of {self._names[key]} came after it had been sent: it is "
                'computed in several parts (reentrant checkpointing?). Take scheduling="sequential"'
            )
        if self._measuring is not None and self._num_done == self._num_passes - 1:
            self._measuring.gradient_is_there(parameter)
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        if self._num_seen[key] != self._num_passes:
            return
        bucket.num_missing -= 1
        overlaps = self.scheduling.overlaps and self._measuring is None
        if overlaps and self._num_done == self._num_passes - 1:
            while self._next >= 0 and not self._buckets[self._next].num_missing:
                self._send_next()

    def _densify(self, parameter: Tensor) -> None:
        if not self._densifies:
            raise ValueError(
                f"the gradient of {self._names[id(parameter)]} is sparse, and compression works "
                "on dense ones. Make the layer with sparse=False, or the optimizer with "
                "sparse_as_dense=True"
            )
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_dense()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        x = bucket.gradient()
        if self.exchange is None:
            self.exchange = self._make_exchange(x.device)
            self.exchange.agree_on(self.described())
            self.meter.begin(self.exchange.communicator, self.exchange.label)
        after = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None
        is_last = self._next == 0
        bucket.future = self.exchange.mean(
            bucket.name, bucket.layout, x, is_last=is_last, after=after
        )
        self.meter.add_bucket(x)
        self._next -= 1

    def _forget_interrupted(self) -> None:
        """Begins anew after a backward pass that an exception has ended."""
        if any(bucket.future is not None for bucket in self._buckets):
            self._check_alive()
            raise RuntimeError(
                "an earlier backward pass has failed when some of its gradients had been sent: "
                "start again from a checkpoint"
            )
        self._at_end = None
        self._reset()

    def _check_alive(self) -> None:
        """Raises why exchanges have ended, if they have."""
        if self.exchange is not None:
            self.exchange.check_alive()

    def check_complete(self) -> None:
        """Raises if an exception has ended the backward pass of the gradients that are there."""
        self._check_alive()
        if self._at_end is not None:
            raise RuntimeError(
                "the backward pass has not ended, or has failed, so gradients are incomplete and "
                "not averaged. After a failure leave out step(), call zero_grad() and go on with "
                "the next backward pass"
            )

    def _end_of_backward(self) -> None:
        self._at_end = None
        self._num_done += 1
        if self._num_done >= self._num_passes:
            self.finish()

    @property
    def has_unsent(self) -> bool:
        """Whether there are gradients that have not been exchanged."""
        return self._num_done > 0

    def finish(self) -> None:
        """Exchanges what is left, waits for all means, and makes them the gradients."""
        while self._next >= 0:
            self._send_next()
        began = time.perf_counter()
        means = []
        with torch.profiler.record_function("gradwire: wait"):
            for bucket in self._buckets:
                assert bucket.future is not None
                means.append(bucket.future.result())  # raises what went wrong
        assert self.exchange is not None
        self.exchange.finish_step()
        self.meter.add_step(time.perf_counter() - began)
        for bucket, mean in zip(self._buckets, means):
            bucket.take(mean * self.exchange.communicator.size if self._sums else mean)
        if self._measuring is not None and self._measuring.end_step():
            self._decide(self._measuring.profiles(self.exchange))
        self._reset()

    def _decide(self, profile_of: ProfileOf) -> None:
        """Takes the buckets that measured times ask for; states move with the next exchange."""
        self._measuring = None
        if len(_kinds(self.named)) == 1:  # else each has groups of its own
            tensors = _tensors_of(self.named)
            self.scheduling = self.scheduling.resolve(tensors, profile_of(tensors))
        self._take_buckets(cut_into_buckets(self.named, self.scheduling, profile_of))
