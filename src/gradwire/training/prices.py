"""What the exchange of a bucket costs, measured by exchanging some.

Buckets of several sizes go through the compression and the architecture of a plan, on any engine:
on the simulator that gives virtual times, with the bytes of real payloads, their route and the time
of coding; on real processes it is a measurement. Each size is exchanged alone, and then several
times at once. What each of these adds is how long it holds up the others (`busy_s`): the time of
the busiest of encoding, sending and receiving, which go on side by side. The rest of the time of
one alone passes while others are under way (`delay_s`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core.codec import is_finite
from gradwire.core.group import Group
from gradwire.core.limits import Limits
from gradwire.core.node import Node
from gradwire.core.profile import Price
from gradwire.core.ramp import at
from gradwire.core.replica import Bucket
from gradwire.training.optimizer import State, clipped_update
from gradwire.training.plan import Plan

_SMALLEST, _LARGEST = 16, 1 << 18  # elements
_TOGETHER = 6  # exchanges at once


def priced_numels(num_params: int, factor: int = 2) -> list[int]:
    """Sizes of buckets up to the whole model, each `factor` times the one before."""
    largest = min(num_params, _LARGEST)
    numels = [largest]
    while numels[-1] > _SMALLEST:
        numels.append(max(_SMALLEST, numels[-1] // factor))
    return numels[::-1]


def drawn_gradient(plan: Plan, numels: Sequence[int]) -> Tensor:
    """Something to exchange: what exchanges cost should not depend on the first batch."""
    params = plan.task.initial_params()
    return plan.key.child("prices").normal(max(numels), params.device).to(params.dtype)


def priced_limits(numels: Sequence[int]) -> Limits:
    """Of servers that form the means of these exchanges."""
    return Limits({_label(numel, i): numel for numel in numels for i in range(_TOGETHER)})


async def price_exchanges(
    plan: Plan, numels: Sequence[int], gradient: Tensor, node: Node, repeats: int = 1
) -> tuple[Price, ...]:
    """The program of every worker; all get the same result. Parts of `gradient` are exchanged."""
    pricing = _Pricing(plan, node, gradient)
    prices = []
    for numel in numels:
        alone_s = min([await pricing.seconds(numel, 1) for _ in range(repeats)])
        together_s = min([await pricing.seconds(numel, _TOGETHER) for _ in range(repeats)])
        busy_s = max(0.0, together_s - alone_s) / (_TOGETHER - 1)
        prices.append(Price(numel, busy_s, max(0.0, alone_s - busy_s)))
    return tuple(prices)


class _Pricing:
    def __init__(self, plan: Plan, node: Node, gradient: Tensor) -> None:
        self.plan, self.node, self.gradient = plan, node, gradient
        self.key = plan.key.child("prices").at(plan.num_steps - 1).private(node.rank)
        self.params = plan.task.initial_params()
        self._states: dict[int, State] = {}

    async def _state(self, numel: int, x: Tensor) -> State:
        """A state of compression after one exchange: some methods begin in another way."""
        if numel not in self._states:
            plan, label = self.plan, _label(numel, 0)
            spec = plan.spec(Bucket("priced", 0, numel), self.params.dtype)
            fresh = plan.reducer.init(spec, plan.num_workers)
            group = plan.architecture.group(self.node, label)
            key = self.key.at(0).child(label)
            self._states[numel] = (await plan.reducer.mean(x, fresh, key, group)).state
        return self._states[numel]

    async def seconds(self, numel: int, count: int) -> float:
        """Of exchanges at once; that of the slowest worker."""
        node, plan = self.node, self.plan
        x, params = self.gradient[:numel], self.params[:numel]
        state = await self._state(numel, x)
        optimizer = plan.optimizer.init(params) if plan.updates_by_bucket else None
        await self._slowest(0.0)  # all are here
        began = await node.now()
        tasks = [
            await node.spawn(self._exchange(_label(numel, i), x, state, params, optimizer))
            for i in range(count)
        ]
        for task in tasks:
            await node.join(task)
        return await self._slowest(await node.now() - began)

    async def _exchange(
        self, label: str, x: Tensor, state: Any, params: Tensor, optimizer: State | None
    ) -> None:
        node, plan = self.node, self.plan
        group = plan.architecture.group(node, label)
        reduced = await plan.reducer.mean(x, state, self.key.child(label), group)
        if optimizer is not None:  # each bucket is updated by itself
            await node.share(is_finite, reduced.mean)
            rule = at(plan.optimizer, 0, plan.steps_per_epoch)
            step = (rule, None, plan.lr(0), params, reduced.mean, optimizer)
            await node.share(clipped_update, *step)

    async def _slowest(self, seconds: float) -> float:
        """The largest of all workers' numbers. Waits until all workers are here."""
        own = torch.tensor(seconds, dtype=torch.float64)
        return max(float(each) for each in await Group(self.node, "prices").all_gather(own))


def _label(numel: int, number: int) -> str:
    return f"priced {numel}.{number}"
