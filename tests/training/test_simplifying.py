"""Traced gradients lose calls that compute nothing new, and no bits."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from gradwire.training.evaluation.simplifying import simplify


def traced(function, *arguments: Tensor) -> GraphModule:
    return make_fx(function)(*arguments)


def calls(graph: GraphModule) -> Counter[object]:
    return Counter(node.target for node in graph.graph.nodes if node.op == "call_function")


def convolutions(x: Tensor, weight: Tensor) -> Tensor:
    """[n, B, C, H, W] and [n, C, C, 3, 3], each worker its own."""

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(torch.conv2d(x, weight, padding=1))
        return x.square().sum()

    return torch.func.vmap(torch.func.grad(loss))(weight, x)


def test_activations_of_a_batch_of_workers_are_put_in_order_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 4, 5, 5, generator=generator)
    weight = torch.randn(3, 4, 4, 3, 3, generator=generator)
    graph = traced(convolutions, x, weight)
    before = calls(graph)
    simplify(graph)
    after = calls(graph)
    clone = torch.ops.aten.clone.default
    assert after[clone] < before[clone]
    assert after[torch.ops.aten.convolution.default] == 3
    assert after[torch.ops.aten.convolution_backward.default] == 3
    assert torch.ops.aten.detach.default not in after
    assert torch.equal(graph(x, weight), convolutions(x, weight))


def test_equal_calls_are_one() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        first, second = (x + 1).split(1), (x + 1).split(1)
        return first[0] * second[1], second[1] * first[0], first[0] * second[1]

    x = torch.tensor([1.0, 2.0])
    graph = traced(function, x)
    simplify(graph)
    assert calls(graph)[torch.ops.aten.add.Tensor] == 1
    assert calls(graph)[torch.ops.aten.mul.Tensor] == 2  # of which two are the same
    assert [float(each) for each in graph(x)] == [6.0, 6.0, 6.0]


def test_numbers_of_different_types_differ() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x * 2, x * 2.0, torch.sum(x, 0, True), torch.sum(x, 0, False)

    x = torch.tensor([1, 2])
    graph = traced(function, x)
    simplify(graph)
    whole, real, kept, single = graph(x)
    assert (whole.dtype, real.dtype) == (torch.int64, torch.float32)
    assert (kept.dim(), single.dim()) == (1, 0)


@pytest.mark.parametrize("kind", ["writes", "draws"])
def test_graphs_that_write_or_draw_are_left_alone(kind: str) -> None:
    def writes(x: Tensor) -> Tensor:
        one, other = x.clone(), x.clone()
        one.add_(1)
        return one + other

    def draws(x: Tensor) -> Tensor:
        return torch.bernoulli(x) + torch.bernoulli(x)

    x = torch.full((3,), 0.5)
    with torch.random.fork_rng(devices=[]):
        graph = traced({"writes": writes, "draws": draws}[kind], x)
        before = calls(graph)
        simplify(graph)
        assert calls(graph) == before
    if kind == "writes":
        assert torch.equal(graph(x), torch.full((3,), 2.0))
