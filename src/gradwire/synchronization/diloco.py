"""DiLoCo (Douillard et al. 2023, "DiLoCo: Distributed low-communication training of language
models", Alg. 1) and its streaming form (Douillard et al. 2025, "Streaming DiLoCo with overlapping
communication", Alg. 2).

Every worker takes `period` steps alone from the common model y. The mean of their changes is an
outer gradient for y, with which SGD with Nesterov's momentum takes a step:

    D <- (1/n) sum_i (y - x_i);   v <- mu v + D;   y <- y - eta (D + mu v);   x_i <- y

with eta = outer_lr and mu = outer_momentum; the paper's are the defaults. The inner optimizer keeps
its own momentum. With eta = 1 and mu = 0 it is `localsgd`.

Streaming: the tensors are dealt to `fragments` in turn, and each fragment has rounds of `period`
steps of its own, which end at different times: no more than a part travels at once. An exchange may
take `delay` steps (the paper's tau), in which workers continue; then its result is mixed in:

    x_i <- mixing * x_i + (1 - mixing) * y        (for the fragment; mixing is the paper's alpha)

0 discards the local steps since then, 1 would ignore the other workers. Outer gradients are
relative to y also with mixing.

The last step of a run ends with agreement on all fragments: workers wait for pending exchanges,
exchange the fragments that changed since their last one, and take y.

The outer gradients are compressed as configured. SparseLoCo (Sarfi et al. 2025) is diloco without
outer momentum, with feedback on the largest entries in 2 bits each:

    synchronization = "diloco(30, outer_lr=1.0, outer_momentum=0.0)"
    compression     = "ef(topk(0.03) >> eden(2, unbiased=False))"

Use it where rounds must be long, between data centres, with adam inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core.node import RunningProgram
from gradwire.core.protocols import Bucket, Replica, Synchronization, Worker

_PENDING = "diloco"  # in the worker's scratch: exchanges under way, by fragment


class _PendingExchange(NamedTuple):
    """A pending exchange of a fragment's mean walk."""

    due: int  # the step at whose end the result is applied
    before: Replica  # the replica when the exchange started
    task: RunningProgram[tuple[Tensor | None, Replica]]


@dataclass(frozen=True, repr=False)
class DiLoCo(Synchronization):
    """Take `period` steps alone; the mean change is a gradient for an outer optimizer."""

    period: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1  # parts of the model that are exchanged at different times
    delay: int = 0  # steps that an exchange may take
    mixing: float = 0.0  # weight of the local parameters when a result is mixed in

    examples = (
        "diloco(50)",
        "diloco(30, outer_lr=1.0, outer_momentum=0.0)",
        "diloco(100, outer_lr=0.4, delay=5, mixing=0.5)",
    )
    short_examples = ("diloco(4)",)
    exchanges = "walks"
    known_as = ("streaming_diloco", "sparseloco", "opendiloco", "fedopt")
    paper = (
        "Douillard et al. 2023, DiLoCo: Distributed low-communication training of language models"
    )

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"diloco: period must be at least 1, got {self.period}")
        if not 0 < self.outer_lr < float("inf"):
            raise ValueError(
                f"diloco: outer_lr must be finite and above 0, got {self.outer_lr}. Try 0.7."
            )
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"diloco: outer_momentum must lie in 0 .. 1, below 1, got {self.outer_momentum}. "
                "Try 0.9."
            )
        if self.fragments < 1:
            raise ValueError(f"diloco: fragments must be at least 1, got {self.fragments}")
        if not 0 <= self.delay < self.period:
            raise ValueError(
                f"diloco: delay must lie in 0 .. period - 1 = {self.period - 1}, got {self.delay}: "
                "what is exchanged must be there before the next round ends"
            )
        if not 0 <= self.mixing <= 1:
            raise ValueError(f"diloco: mixing must lie in 0 .. 1, got {self.mixing}")

    @property
    def pauses(self) -> bool:
        return self.delay == 0

    def check(self, num_workers: int, num_buckets: int) -> None:
        if self.fragments > num_buckets:
            remedy = (
                "Write scheduling='sequential(\"layer\")'."
                if num_buckets == 1
                else f"Take at most {num_buckets} fragments."
            )
            raise ValueError(
                f"{self!r} deals the model to {self.fragments} fragments, but it is exchanged in "
                f"{num_buckets} piece(s). {remedy}"
            )

    def memory(self, params: Tensor) -> dict[str, Tensor]:
        return {"anchor": params, "velocity": torch.zeros_like(params)}  # y and v

    def agreed(self, replica: Replica) -> Tensor:
        return replica.memory["anchor"]

    def ends_round(self, fragment: int, step: int) -> bool:
        """Whether a fragment is exchanged at the end of this step."""
        return (step + 1 - fragment * self.period // self.fragments) % self.period == 0

    async def step(self, worker: Worker, replica: Replica, step: int) -> Replica:
        gradient, replica = await worker.gradient(replica, step)
        if gradient is not None:
            replica = await worker.update(replica, gradient, step, shared=False)
        is_last = step + 1 == worker.num_steps
        pending: dict[int, _PendingExchange] = worker.scratch.setdefault(_PENDING, {})
        finished = []
        for fragment, exchange in list(pending.items()):  # in the order in which they started
            ends_again = self.ends_round(fragment, step)  # a ramp made the period shorter
            if is_last or exchange.due <= step or ends_again:
                result = await worker.node.join(pending.pop(fragment).task)
                mixing = 0.0 if is_last else self.mixing
                replica = _merge_exchanged(
                    replica, exchange.before, result[1], self._buckets_of(fragment, worker)
                )
                replica = await self._apply(worker, replica, fragment, result[0], mixing)
                finished.append(fragment)
        for fragment in range(self.fragments):
            if is_last and fragment not in finished:
                replica = await self._exchange(worker, replica, fragment, step, 0.0)
            elif not is_last and self.ends_round(fragment, step):
                if self.delay:
                    await self._start_exchange(worker, replica, fragment, step)
                else:
                    replica = await self._exchange(worker, replica, fragment, step, self.mixing)
        return replica

    def _buckets_of(self, fragment: int, worker: Worker) -> list[int]:
        """The numbers of its buckets: strided over the layers, which the paper finds best."""
        return list(range(fragment, len(worker.buckets), self.fragments))

    async def _exchange(
        self, worker: Worker, replica: Replica, fragment: int, step: int, mixing: float
    ) -> Replica:
        """Averages what was walked, waits for it and takes it in."""
        mean, replica = await self._mean(worker, replica, fragment, step)
        return await self._apply(worker, replica, fragment, mean, mixing)

    async def _start_exchange(
        self, worker: Worker, replica: Replica, fragment: int, step: int
    ) -> None:
        """Begins to average what was walked."""
        pending: dict[int, _PendingExchange] = worker.scratch[_PENDING]
        earlier = [exchange.task for exchange in pending.values()]

        async def program() -> tuple[Tensor | None, Replica]:
            for task in earlier:  # one after the other: it is one network
                await worker.node.join(task)
            return await self._mean(worker, replica, fragment, step)

        task = await worker.node.spawn(program())
        pending[fragment] = _PendingExchange(step + self.delay, replica, task)

    async def _mean(
        self, worker: Worker, replica: Replica, fragment: int, step: int
    ) -> tuple[Tensor | None, Replica]:
        walk = await worker.node.call(torch.sub, replica.params, replica.memory["anchor"])
        chosen = None if self.fragments == 1 else self._buckets_of(fragment, worker)
        return await worker.mean(walk, replica, step, buckets=chosen)

    async def _apply(
        self, worker: Worker, replica: Replica, fragment: int, mean: Tensor | None, mixing: float
    ) -> Replica:
        """One step of the outer optimizer, and its result in the worker's own model."""
        node = worker.node
        spans = _spans([worker.buckets[i] for i in self._buckets_of(fragment, worker)])
        if mean is None:  # the walk was dropped: all return to the anchor
            mixing = 0.0
        else:
            memory = replica.memory
            anchor, velocity = await node.share(
                _nesterov,
                memory["anchor"],
                memory["velocity"],
                mean,
                spans,
                self.outer_lr,
                self.outer_momentum,
            )
            replica = replica.remembering(anchor=anchor, velocity=velocity)
        anchor = replica.memory["anchor"]
        if self.fragments == 1 and not mixing:
            return replica.having(params=anchor)
        return replica.having(params=await node.call(_mix, replica.params, anchor, spans, mixing))


Spans = tuple[tuple[int, int], ...]


def _spans(buckets: Sequence[Bucket]) -> Spans:
    return tuple((bucket.start, bucket.stop) for bucket in buckets)


def _nesterov(
    anchor: Tensor, velocity: Tensor, walk: Tensor, spans: Spans, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """The outer optimizer on some spans; `walk` has them one after the other."""
    anchor, velocity = anchor.clone(), velocity.clone()
    pieces = walk.split([stop - start for start, stop in spans])
    for (start, stop), piece in zip(spans, pieces):
        speed = velocity[start:stop]
        speed.mul_(momentum).sub_(piece)
        anchor[start:stop].sub_(speed * momentum - piece, alpha=lr)
    return anchor, velocity


def _mix(own: Tensor, anchor: Tensor, spans: Spans, mixing: float) -> Tensor:
    """own, with mixing * own + (1 - mixing) * anchor on some spans."""
    own = own.clone()
    for start, stop in spans:
        own[start:stop] = torch.lerp(anchor[start:stop], own[start:stop], mixing)
    return own


def _merge_exchanged(
    replica: Replica, before: Replica, after: Replica, buckets: Sequence[int]
) -> Replica:
    """The replica of now, with what an exchange of these buckets changed since `before`."""
    states: list[Any] = list(replica.exchange)
    for i in buckets:
        states[i] = after.exchange[i]
    dropped = replica.num_dropped + after.num_dropped - before.num_dropped
    return replica.having(exchange=tuple(states), num_dropped=dropped)
