"""Going on with other buckets and other numbers of workers."""

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.group import Group
from gradwire.core.key import Key
from gradwire.core.lifted import lift
from gradwire.core.node import Node
from gradwire.core.spec import Spec
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.training.program import train
from gradwire.training.regroup import regroup, regroup_here, regroup_states
from sampling import slow


def _plan(**settings):
    base = {"compression": "ef(topk(0.05))", "steps": 6, "compute": "fixed(0.01)"}
    return prepare(Config(**{**base, **settings})).plan


def _trained(plan, replicas, first, last):
    engine = VirtualEngine(Network.uniform(plan.num_workers), evaluate=plan.task.gradients)
    return engine.run(
        [lambda node: train(plan, node, replicas[node.rank], first, last)] * plan.num_workers
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


@pytest.mark.parametrize("workers", [slow(1), slow(2), 7])
def test_workers_come_and_go(workers) -> None:
    four, other = _plan(), _plan(workers=workers)
    replicas = _trained(four, four.initial_replicas(), 0, 3)
    moved = regroup(replicas, four, other)
    assert len(moved) == workers
    torch.testing.assert_close(_owed(moved), _owed(replicas), rtol=0, atol=1e-6)
    after = _trained(other, moved, 3, 6)
    assert all(torch.equal(replica.params, after[0].params) for replica in after)


@pytest.mark.parametrize(
    "text",
    [slow("dgc(0.01, warmup=2)"), "ef(topk(ramp(0.2, 0.05, steps=4)))", slow("gmc(topk(0.1))")],
)
def test_epochs_may_have_another_length(text) -> None:
    four, two = _plan(compression=text), _plan(compression=text, workers=2)
    moved = regroup(_trained(four, four.initial_replicas(), 0, 3), four, two)
    after = _trained(two, moved, 3, 6)
    assert torch.equal(after[0].params, after[1].params)


def test_what_servers_owe_is_paid_without_them() -> None:
    """From four workers that scatter to two that gather, with no more gradients."""
    reducer, spec = COMPRESSION.parse("ef(topk(0.1))"), Spec((4000,), torch.float64)

    async def program(node: Node, states, steps, route, strength):
        state, applied = states[node.rank][0], torch.zeros(4000, dtype=torch.float64)
        for step in steps:
            x = strength * Key(1).at(step).private(node.rank).normal(4000).double()
            key = Key(2).at(step).private(node.rank)
            reduced = await reducer.mean(x, state, key, AllReduce(route).group(node, "x"))
            state, applied = reduced.state, applied + reduced.mean
        return applied, (state,)

    def run(states, steps, route, strength):
        size = len(states)
        programs = [lambda node: program(node, states, steps, route, strength)] * size
        results = VirtualEngine(Network.uniform(size)).run(programs)
        return results[0][0], [state for _, state in results]

    fresh = [(reducer.init(spec, 4),) for _ in range(4)]
    first, states = run(fresh, range(3), "scatter", 1.0)
    assert float(states[0][0]["inner"]["scatter"]["owned"]["residual"].norm()) > 1
    moved = regroup_states(reducer, states, [spec], [spec], 2)
    rest, states = run(moved, range(3, 40), "gather", 0.0)
    given = sum(
        Key(1).at(step).private(rank).normal(4000).double()
        for step in range(3)
        for rank in range(4)
    )
    # Four workers' mean before, two workers' mean of the same sum after.
    torch.testing.assert_close(4 * first + 2 * rest, given, rtol=0, atol=1e-9)
    assert float(states[0][0]["residual"].norm()) == 0


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize(
    "text",
    [
        "ef(topk(0.1))",
        "qsgd(bits=4)",
        slow("ef21(topk(0.1), momentum=0.5)"),
        slow("dgc(0.1)"),
        'partition({"b": ef(sign), "*": ef(topk(0.1))})',
    ],
)
def test_each_rank_moves_its_own_states_to_other_buckets(text, route) -> None:
    """Without the states of the others, but for what owners of shards keep."""
    reducer = lift(COMPRESSION.parse(text))
    tensors = {"a": (60, 40), "b": (1600,), "c": (1000,)}
    size = 3

    def spec(names: str) -> Spec:
        placed, start = [], 0
        for name in names:
            numel = torch.Size(tensors[name]).numel()
            placed.append((name, start, start + numel, tensors[name]))
            start += numel
        return Spec((start,), torch.float64, tensors=tuple(placed))

    old, new = [spec("ab"), spec("c")], [spec("a"), spec("bc")]

    async def program(node: Node):
        states = [reducer.init(own, size) for own in old]
        for step in range(3):
            key = Key(2).at(step).private(node.rank)
            for i, own in enumerate(old):
                x = key.child(i).normal(own.numel).double()
                group = AllReduce(route).group(node, str(i))
                states[i] = (await reducer.mean(x, states[i], key.child(i), group)).state
        return tuple(states), await regroup_here(reducer, states, old, new, Group(node, "r"))

    results = VirtualEngine(Network.uniform(size)).run([program] * size)
    expected = regroup_states(reducer, [states for states, _ in results], old, new, size)
    for (_, moved), own in zip(results, expected):
        _assert_equal(moved, own)


def test_buckets_may_have_their_tensors_in_another_order() -> None:
    reducer = lift(COMPRESSION.parse("ef(topk(0.5))"))
    forward = Spec((5,), torch.float32, tensors=(("a", 0, 3, (3,)), ("b", 3, 5, (2,))))
    backward = Spec((5,), torch.float32, tensors=(("b", 0, 2, (2,)), ("a", 2, 5, (3,))))
    state = {**reducer.init(forward, 1), "residual": torch.arange(5.0)}

    async def program(node: Node):
        return await regroup_here(reducer, [state], [forward], [backward], Group(node, "r"))

    ((moved,),) = VirtualEngine(Network.uniform(1)).run([program])
    assert moved["residual"].tolist() == [3.0, 4.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("text", ["powersgd(2)", "ef(powersgd(2))"])
def test_factors_go_with_their_matrices(text) -> None:
    """Buckets with other neighbours continue as if nothing had happened."""
    reducer = lift(COMPRESSION.parse(text))
    shapes = {"a": (20, 30), "b": (7,), "c": (20, 30), "d": (30, 10)}

    def spec(names: str) -> Spec:
        placed, start = [], 0
        for name in names:
            numel = torch.Size(shapes[name]).numel()
            placed.append((name, start, start + numel, shapes[name]))
            start += numel
        return Spec((start,), torch.float32, tensors=tuple(placed))

    async def program(node: Node):
        states = {}
        for names in ("abcd", "dac", "b"):
            if names == "abcd":
                own = reducer.init(spec(names), 2)
            else:
                old = [spec("abcd")]
                moved = await regroup_here(
                    reducer, [states["abcd"]], old, [spec(names)], Group(node, names)
                )
                (own,) = moved
            x = Key(1).private(node.rank).normal(spec(names).numel)
            if names == "abcd":
                own = (await reducer.mean(x, own, Key(2), AllReduce().group(node, "x"))).state
            states[names] = own
        return states

    for states in VirtualEngine(Network.uniform(2)).run([program] * 2):
        before, after = (reducer.of_tensors(states[names]) for names in ("abcd", "dac"))
        assert before.keys() == after.keys() == {"a", "c", "d"}
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert reducer.of_tensors(states["b"]) == {}


def _assert_equal(a, b) -> None:
    if isinstance(a, torch.Tensor):  # `regroup_states` forms the mean of estimates again
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            _assert_equal(a[name], b[name])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            _assert_equal(x, y)
    else:
        assert a == b


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
