"""A traced gradient cut into stages: each ends when the gradient of another layer is there.

The graph of a gradient ends with one concatenation of the gradients of all tensors. Its inputs are
there long before: the backward pass makes those of the last layer first. A stage is a graph of its
own, so that stages are as fast as the whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.unsqueeze.default)


class StagedGraph:
    """The stages of a graph whose first result is a flat gradient, [1, d].

    `layers` has the numbers of the tensors of each layer.
    """

    def __init__(self, graph: GraphModule, layers: Sequence[Sequence[int]]) -> None:
        nodes = [node for node in graph.graph.nodes if node.op != "output"]
        (results,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        self._results = [node.name for node in results[1:]]
        pieces = _concatenated(results[0])
        if pieces is None or len(pieces) != sum(map(len, layers)):
            raise ValueError("the gradient does not end with a concatenation of those of tensors")
        position = {node: i for i, node in enumerate(nodes)}
        # A stage ends when the tensors of its layer and of all later layers have gradients.
        self.stages: list[tuple[int, list[str]]] = []  # layer, names of its tensors' gradients
        ends = []
        end = 0
        for number in reversed(range(len(layers))):
            own = [pieces[tensor] for tensor in layers[number]]
            end = max(end, *(position[node] + 1 for node in own))
            ends.append(end)
            self.stages.append((number, [node.name for node in own]))
        wanted = {*results[1:], *pieces}
        self._arguments = [node.name for node in nodes if node.op == "placeholder"]
        self._graphs = [
            _cut(graph, nodes, start, stop, wanted)
            for start, stop in zip([0, *ends], [*ends, len(nodes)])
        ]

    def run(self, *arguments: Tensor) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
        """For each layer, last one first: its number and the gradients of its tensors.

        The values of a tensor are in order, its shape may be another. With the last one come the
        other results of the graph.
        """
        values: dict[str, Any] = dict(zip(self._arguments, arguments))
        for number, (module, inputs, outputs) in enumerate(self._graphs):
            made = module(*(values[name] for name in inputs))
            values.update(zip(outputs, made))
            if number < len(self.stages) - 1:
                layer, names = self.stages[number]
                yield layer, [values[name] for name in names], []
        layer, names = self.stages[-1]
        yield layer, [values[name] for name in names], [values[name] for name in self._results]


def _concatenated(node: Node) -> list[Node] | None:
    """The inputs of the concatenation that a node is, seen through changes of shape."""
    node = _source(node)
    if node.op == "call_function" and node.target is torch.ops.aten.cat.default:
        return [_source(piece) for piece in node.args[0]]  # type: ignore[union-attr, arg-type]
    return None


def _source(node: Node) -> Node:
    """The node whose values a node has, in another shape. It may come much earlier."""
    while node.op == "call_function" and node.target in _VIEWS:
        (node, *_) = node.args  # type: ignore[assignment]
    return node


def _cut(
    graph: GraphModule, nodes: Sequence[Node], start: int, stop: int, wanted: set[Node]
) -> tuple[GraphModule, list[str], list[str]]:
    """The nodes from start to stop as a module, with the names of its inputs and outputs."""
    part = [node for node in nodes[start:stop] if node.op != "placeholder"]
    inside = set(part)
    later = {use for node in nodes[stop:] for use in node.all_input_nodes}
    inputs = dict.fromkeys(
        use for node in part for use in node.all_input_nodes if use not in inside
    )
    outputs = [node for node in part if node in later or node in wanted]
    piece = Graph()
    copies: dict[Node, Node] = {node: piece.placeholder(node.name) for node in inputs}
    for node in part:
        copies[node] = piece.node_copy(node, lambda old: copies[old])
    piece.output([copies[node] for node in outputs])
    return GraphModule(graph, piece), [n.name for n in inputs], [n.name for n in outputs]
