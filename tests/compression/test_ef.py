"""Error feedback: what was applied and what is still held back is all there ever was."""

import io

import pytest
import torch
from torch import Tensor

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.architecture.allreduce.ring import Ring
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.reducer import Reduced, Reducer
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine

NUMEL = 60


def gradient(rank: int, step: int) -> Tensor:
    return Key(31).at(step).private(rank).normal(NUMEL).double()


def run(
    reducer: Reducer,
    size: int,
    steps: range,
    states: list,
    architecture=Ring(),  # noqa: B008
) -> list[list[Reduced]]:
    async def program(node: Node) -> list[Reduced]:
        results, state = [], states[node.rank]
        for step in steps:
            group = architecture.group(node, "x")
            key = Key(1).at(step).private(node.rank)
            results.append(await reducer.mean(gradient(node.rank, step), state, key, group))
            state = results[-1].state
        return results

    return VirtualEngine(Network.uniform(size)).run([program] * size)


def fresh(reducer: Reducer, size: int) -> list:
    return [reducer.init(Spec((NUMEL,), torch.float64), size) for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("architecture", [Ring(), AllReduce("gather")], ids=repr)
@pytest.mark.parametrize(
    "text",
    [
        "ef(identity)",
        "ef(sign)",
        "ef(topk(0.05))",
        "ef(randomk(0.1))",
        "ef(qsgd(1))",
        "ef(topk(0.1) >> qsgd(bits=4))",
        "ef(topk(0.1) >> fp16)",
    ],
)
def test_applied_updates_and_residuals_are_the_sum_of_all_gradients(
    text, architecture, size
) -> None:
    reducer, num_steps = COMPRESSION.parse(text), 12
    results = run(reducer, size, range(num_steps), fresh(reducer, size), architecture)
    everything = sum(gradient(rank, step) for rank in range(size) for step in range(num_steps))
    applied = sum(result.mean for result in results[0]) * size
    for step in range(num_steps):
        for rank in range(size):
            assert torch.equal(results[rank][step].mean, results[0][step].mean)
    held = sum(steps[-1].state["residual"] for steps in results)
    assert torch.allclose(applied + held, everything, rtol=0, atol=1e-13 * num_steps * size)
    if text != "ef(identity)":
        assert held.abs().max() > 1e-4  # something is held back, so the equation says something


def test_the_residual_is_the_corrected_gradient_less_what_was_heard() -> None:
    reducer = COMPRESSION.parse("ef(topk(0.05))")
    (results,) = run(reducer, 1, range(3), fresh(reducer, 1))
    residual = torch.zeros(NUMEL, dtype=torch.float64)
    for step, result in enumerate(results):
        corrected = gradient(0, step) + residual
        largest = corrected.abs().topk(3).indices
        sent = torch.zeros_like(corrected)
        sent[largest] = corrected[largest]
        assert torch.equal(result.mean, sent)
        residual = corrected - sent
        assert torch.equal(result.state["residual"], residual)


def test_every_element_gets_its_turn() -> None:
    reducer = COMPRESSION.parse("ef(topk(0.05))")
    (results,) = run(reducer, 1, range(100), fresh(reducer, 1))
    assert (sum(result.mean != 0 for result in results) > 0).all()


@pytest.mark.parametrize("text", ["ef(topk(0.05))", "ef(topk(0.1) >> qsgd(bits=4))", "ef(sign)"])
@pytest.mark.parametrize("architecture", [Ring(), AllReduce("scatter")], ids=repr)
def test_a_saved_state_goes_on_where_it_stopped(text, architecture) -> None:
    reducer, size = COMPRESSION.parse(text), 3
    whole = run(reducer, size, range(6), fresh(reducer, size), architecture)
    first = run(reducer, size, range(3), fresh(reducer, size), architecture)
    file = io.BytesIO()
    torch.save([steps[-1].state for steps in first], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)  # nothing in it but tensors and containers
    second = run(reducer, size, range(3, 6), states, architecture)
    for rank in range(size):
        for step in range(3):
            assert torch.equal(second[rank][step].mean, whole[rank][3 + step].mean)
        assert torch.equal(second[rank][-1].state["residual"], whole[rank][-1].state["residual"])


def test_the_old_state_is_left_as_it_was() -> None:
    reducer = COMPRESSION.parse("ef(topk(0.05))")
    states = fresh(reducer, 2)
    run(reducer, 2, range(1), states)
    for state in states:
        assert torch.equal(state["residual"], torch.zeros(NUMEL, dtype=torch.float64))


@pytest.mark.parametrize(
    "text",
    [
        "ef(ef(sign))",
        "ef(ef21(sign))",
        'ef(partition({"*": "ef(sign)"}))',
        'ef(partition({"a": "ef(sign)", "*": "fp16"}))',
    ],
)
def test_feedback_within_feedback_is_refused_before_anything_runs(text) -> None:
    with pytest.raises(ValueError, match="one is enough"):
        COMPRESSION.parse(text)


def test_a_coder_alone_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="must follow a quantiser"):
        COMPRESSION.parse("ef(rans)")
