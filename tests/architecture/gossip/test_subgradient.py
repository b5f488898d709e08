import torch

from gradwire.architecture.gossip.gossip import Gossip
from gradwire.architecture.gossip.subgradient import Subgradient


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_a_step_by_hand(train, path):
    x, b = column(3.0, 6.0, 9.0), column(1.0, 2.0, 3.0)
    result = train(Gossip(path, Subgradient()), x, b=b, steps=1, lr=0.5)
    # W x = 4, 6, 8, and half the way from there to b.
    assert torch.allclose(result.params, column(2.5, 4.0, 5.5))
