import pytest
import torch

from gradwire.architecture.gossip.gossip import Gossip
from gradwire.architecture.gossip.gradient_tracking import GradientTracking
from sampling import slow


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_two_steps_by_hand(train, path):
    x, b = column(3.0, 6.0, 9.0), column(1.0, 2.0, 3.0)
    matrix, lr = path.matrix(3), 0.5
    y = -lr * (x - b)
    first = matrix @ x + y
    y = matrix @ y - lr * (first - b) + lr * (x - b)
    second = matrix @ first + y
    result = train(Gossip(path, GradientTracking()), x, b=b, steps=2, lr=lr)
    assert torch.allclose(result.history[1, 0], first[1])
    assert torch.allclose(result.params, second)
    tracked = torch.stack([replica.memory["tracked"] for replica in result.replicas])
    assert torch.allclose(tracked, y)


def test_tracks_the_mean_walk(train, vectors):
    result = train("gossip(ring, gradient_tracking)", b=vectors(5), steps=9, lr=0.1)
    tracked = torch.stack([replica.memory["tracked"] for replica in result.replicas])
    walks = torch.stack([replica.memory["walk"] for replica in result.replicas])
    assert torch.allclose(tracked.mean(0), walks.mean(0), atol=1e-14)


@pytest.mark.parametrize(
    "graph", ["ring", slow("exponential"), slow("one_peer_exponential"), slow("matching")]
)
def test_reaches_the_optimum_of_all_where_dpsgd_stays_biased(graph, train, vectors):
    a = torch.tensor([0.5, 1.0, 1.5, 2.0, 1.0, 0.7], dtype=torch.float64)
    b = vectors(6)
    best = (a[:, None] * b).sum(0) / a.sum()
    settings = {"a": a, "b": b, "steps": 300, "lr": 0.1}
    tracking = train(f"gossip({graph}, gradient_tracking)", **settings)
    dpsgd = train(f"gossip({graph}, dpsgd)", **settings)
    assert (tracking.params - best).abs().max() < 1e-5
    assert (dpsgd.params - best).abs().max() > 0.01
