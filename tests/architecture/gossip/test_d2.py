import torch

from gradwire.architecture.gossip.d2 import D2
from gradwire.architecture.gossip.gossip import Gossip


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_two_steps_by_hand(train, path):
    x, b = column(3.0, 6.0, 9.0), column(1.0, 2.0, 3.0)
    matrix, lr = path.matrix(3), 0.5
    first = matrix @ (x - lr * (x - b))
    second = matrix @ (2 * first - x - lr * (first - b) + lr * (x - b))
    result = train(Gossip(path, D2(), lazy=False), x, b=b, steps=2, lr=lr)
    assert torch.allclose(result.history[1, 0], first[1])
    assert torch.allclose(result.params, second)


def test_reaches_the_optimum_of_all_where_dpsgd_stays_biased(train, vectors):
    a = torch.tensor([0.5, 1.0, 1.5, 2.0, 1.0, 0.7], dtype=torch.float64)
    b = vectors(6)
    best = (a[:, None] * b).sum(0) / a.sum()
    d2 = train("gossip(ring, d2, lazy=True)", a=a, b=b, steps=400, lr=0.2)
    dpsgd = train("gossip(ring, dpsgd, lazy=True)", a=a, b=b, steps=400, lr=0.2)
    assert (d2.params - best).abs().max() < 1e-8
    assert (dpsgd.params - best).abs().max() > 0.05
    # And stays there: it has converged, to something else.
    assert torch.allclose(dpsgd.history[0, 398], dpsgd.history[0, 399], atol=1e-9)
