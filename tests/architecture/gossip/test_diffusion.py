import torch

from gradwire.architecture.gossip.diffusion import Diffusion
from gradwire.architecture.gossip.gossip import Gossip


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_a_step_by_hand(train, path):
    x, b = column(3.0, 6.0, 9.0), column(1.0, 2.0, 3.0)
    result = train(Gossip(path, Diffusion()), x, b=b, steps=1, lr=0.5)
    # x + u = 2, 4, 6, then W of it.
    assert torch.allclose(result.params, column(8 / 3, 4.0, 16 / 3))


def test_ends_nearer_to_the_optimum_than_dpsgd(train, vectors):
    # Adapt-then-combine outperforms combine-then-adapt (Tu and Sayed 2012).
    b = vectors(6)
    best = b.mean(0)

    def error(algorithm):
        result = train(f"gossip(ring, {algorithm})", b=b, steps=200, lr=0.2)
        return float((result.params - best).norm())

    assert error("diffusion") < error("subgradient")
    assert error("diffusion") < error("dpsgd")
