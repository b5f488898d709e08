"""Short trainings with a schedule, and with the buckets of another one in sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gradwire.core.profile import Profile
from gradwire.core.protocols import Backward, Bucket, Reduce, Scheduling
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.outcome import Run
from gradwire.experiment.run.setup import Experiment, prepare
from gradwire.experiment.simulate.simulation import simulate_prepared

# Sizes that cut the first tensor of mlp((16, 8)), 1024 weights, and merge the small ones.
OVERLAPPING = (
    "wfbp",
    "fusion(2000, first=500)",
    "mgwfbp",
    "priority(1000, credit=3000, merge=1000)",
    "dear(1000)",
)
SETTINGS: dict[str, Any] = {
    "data": "digits",
    "model": "mlp((16, 8))",
    "workers": 4,
    "steps": 4,
    "batch_size": 8,
    "eval_every": 100,
    "compute": "fixed(0.001)",
    "threads": 1,
    # Bits of gradients may depend on how many workers ask for theirs at the same time.
    "evaluation": "sequential",
}


@dataclass(frozen=True, repr=False)
class InSequence(Scheduling):
    """Exchanges given buckets one after the other, after the backward pass."""

    given: tuple[Bucket, ...]

    def buckets(self, tensors: Sequence[Bucket], profile: Profile) -> list[Bucket]:
        return list(self.given)

    async def exchange(self, backward: Backward, buckets: Sequence[Bucket], reduce: Reduce) -> None:
        gradient = await backward.whole()
        for bucket in buckets:
            await reduce(bucket, gradient[bucket.start : bucket.stop])


def prepared(**settings: Any) -> Experiment:
    return prepare(Config(**{**SETTINGS, **settings}))


def train(**settings: Any) -> Run:
    return simulate_prepared(prepared(**settings))


def train_in_sequence(**settings: Any) -> Run:
    """The run without overlap on the buckets that its schedule has."""
    experiment = prepared(**settings)
    scheduling = InSequence(tuple(experiment.plan.buckets()))
    plan = replace(experiment.plan, scheduling=scheduling)
    return simulate_prepared(replace(experiment, plan=plan))


def assert_same_bits(a: Run, b: Run) -> None:
    """Models, states of optimizers and of compression, and losses are equal on all workers."""
    assert torch.equal(a.params, b.params)
    for left, right in zip(a.replicas, b.replicas, strict=True):
        assert torch.equal(left.params, right.params)
        assert torch.equal(left.loss, right.loss)
        assert left.num_gradients == right.num_gradients
        assert left.optimizer.keys() == right.optimizer.keys()
        assert all(torch.equal(left.optimizer[n], right.optimizer[n]) for n in left.optimizer)
        assert_equal_values(left.exchange, right.exchange)


def assert_equal_values(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_equal_values(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_equal_values(left, right)
    elif hasattr(a, "__dataclass_fields__"):
        for name in a.__dataclass_fields__:
            assert_equal_values(getattr(a, name), getattr(b, name))
    else:
        assert a == b
