"""Momentum before compression."""

import pytest
import torch

from gradwire.architecture.allreduce.allreduce import AllReduce
from gradwire.compression import COMPRESSION
from gradwire.core.key import Key
from gradwire.core.node import Node
from gradwire.core.spec import Spec
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine


def directions(text: str, gradients: torch.Tensor) -> torch.Tensor:
    """[step, element]: what all ranks step along, given [rank, step, element]."""
    reducer = COMPRESSION.parse(text)
    size, steps, numel = gradients.shape

    async def program(node: Node) -> torch.Tensor:
        state = reducer.init(Spec((numel,), gradients.dtype), size)
        means = []
        for step in range(steps):
            key = Key(1).at(step).private(node.rank)
            group = AllReduce().group(node, "x")
            reduced = await reducer.mean(gradients[node.rank, step], state, key, group)
            state = reduced.state
            means.append(reduced.mean)
        return torch.stack(means)

    return VirtualEngine(Network.uniform(size)).run([program] * size)[0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_loss_it_is_torch_s_momentum(nesterov) -> None:
    gradients = Key(2).normal(3 * 5 * 7).double().view(3, 5, 7)
    text = f"velocity(identity, momentum=0.9, nesterov={nesterov})"
    params = torch.zeros(7, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([params], lr=1.0, momentum=0.9, nesterov=nesterov)
    for step, direction in enumerate(directions(text, gradients)):
        before = params.detach().clone()
        params.grad = gradients[:, step].mean(0)
        sgd.step()
        torch.testing.assert_close(before - params.detach(), direction, rtol=0, atol=1e-13)


def test_by_hand() -> None:
    """One worker, two elements, top-1 with feedback, momentum 1/2."""
    gradients = torch.tensor([[[4.0, 1.0], [0.0, 2.0], [0.0, 0.0]]])
    # v = (4, 1): sends 4, keeps (0, 1). v = (2, 2.5): (2, 3.5), sends 3.5, keeps (2, 0).
    # v = (1, 1.25): (3, 1.25), sends 3.
    expected = torch.tensor([[4.0, 0.0], [0.0, 3.5], [3.0, 0.0]])
    assert torch.equal(directions("velocity(ef(topk(0.5)), momentum=0.5)", gradients), expected)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("velocity(ef(sign), momentum=1.0)", "without 1"),
        ("velocity(ef(sign), momentum=-0.1)", "without 1"),
        ("velocity(velocity(sign))", "momentum of its own"),
        ("ef(velocity(sign))", "feedback within feedback"),
    ],
)
def test_mistakes_are_explained(text, complaint) -> None:
    with pytest.raises(ValueError, match=complaint):
        COMPRESSION.parse(text)
