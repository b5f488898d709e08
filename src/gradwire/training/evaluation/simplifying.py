"""Removes calls from a traced gradient that compute nothing new.

Grouped convolutions of n workers need activations in another order than the layers between them.
The backward pass under vmap puts every activation in that order again, which the forward pass has
done already: of the 56 copies in the gradient of ResNet-20, 25 are of that kind. PyTorch merges
equal calls only in graphs whose backward pass it made itself.
"""

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node


def simplify(graph: GraphModule) -> None:
    """Changes the graph to one that does the same arithmetic, in the same order."""
    _drop_detaches(graph)
    _merge_equal_calls(graph)
    graph.recompile()


def _drop_detaches(graph: GraphModule) -> None:
    """Without autograd a detach is nothing but a call; tracing leaves dozens."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def _merge_equal_calls(graph: GraphModule) -> None:
    """Unless some call writes into a tensor: then equal calls may give different values."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    if not all(_only_computes(node.target) for node in calls):
        return
    first: dict[Hashable, Node] = {}
    for node in calls:
        call = node.target, _comparable(node.args), _comparable(node.kwargs)
        found = first.setdefault(call, node)
        if found is not node:
            node.replace_all_uses_with(found)
            graph.graph.erase_node(node)


def _only_computes(target: Any) -> bool:
    """Neither writes into tensors nor draws random numbers."""
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def _comparable(x: Any) -> Hashable:
    """Equal for equal arguments of the same types: 1, 1.0 and True are different."""
    if isinstance(x, Node):
        return x
    if isinstance(x, list | tuple):
        return tuple(_comparable(each) for each in x)
    if isinstance(x, dict):
        return tuple((name, _comparable(each)) for name, each in x.items())
    return type(x), repr(x)
