"""Going on with other buckets and other numbers of workers."""

import pytest
import torch

from gradwire.experiment.config import Config
from gradwire.experiment.setup import prepare
from gradwire.runtime.network import Network
from gradwire.runtime.virtual import VirtualEngine
from gradwire.training.regroup import regroup, regroup_states


def _plan(**settings):
    base = {"compression": "ef(topk(0.05))", "steps": 6, "compute": "fixed(0.01)"}
    return prepare(Config(**{**base, **settings})).plan


def _trained(plan, replicas, first, last):
    engine = VirtualEngine(Network.uniform(plan.num_workers), evaluate=plan.task.gradients)
    return engine.run(
        [lambda node: plan.train(node, replicas[node.rank], first, last)] * plan.num_workers
    )


def _owed(replicas) -> torch.Tensor:
    return sum(
        torch.cat([s["residual"] for s in replica.exchange]).double() for replica in replicas
    )


def test_from_one_bucket_to_layers_and_back_nothing_changes() -> None:
    model, layers = _plan(), _plan(scheduling='sequential("layer")')
    replicas = _trained(model, model.initial_replicas(), 0, 3)
    there = regroup(replicas, model, layers)
    assert len(there[0].exchange) > 1
    assert torch.equal(_owed(there), _owed(replicas))
    back = regroup(there, layers, model)
    for a, b in zip(_trained(model, back, 3, 6), _trained(model, replicas, 3, 6)):
        assert torch.equal(a.params, b.params)


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_workers_come_and_go(workers) -> None:
    four, other = _plan(), _plan(workers=workers)
    replicas = _trained(four, four.initial_replicas(), 0, 3)
    moved = regroup(replicas, four, other)
    assert len(moved) == workers
    torch.testing.assert_close(_owed(moved), _owed(replicas), rtol=0, atol=1e-6)
    after = _trained(other, moved, 3, 6)
    assert all(torch.equal(replica.params, after[0].params) for replica in after)


def test_another_compression_or_model_is_refused() -> None:
    plan, other = _plan(), _plan(compression="ef(sign)")
    replicas = plan.initial_replicas()
    with pytest.raises(ValueError, match="memory of one compression"):
        regroup(replicas, plan, other)
    spec = plan.spec(plan.buckets()[0], torch.float32)
    shorter = type(spec)((spec.numel - 1,), spec.dtype)
    states = [replica.exchange for replica in replicas]
    with pytest.raises(ValueError, match="different models"):
        regroup_states(plan.reducer, states, [spec], [shorter], 4)
