import torch

from gradwire.architecture.gossip.gossip import Gossip
from gradwire.architecture.gossip.sgp import SGP


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def directed(given):
    """0 -> 1 -> 2 -> 0 and 0 -> 2: columns sum to one, rows do not."""
    return given([1 / 3, 0.0, 0.5], [1 / 3, 0.5, 0.0], [1 / 3, 0.5, 0.5])


def test_two_steps_by_hand(train, given):
    graph = directed(given)
    p, lr = graph.matrix(3), 0.5
    x, b = column(3.0, 6.0, 9.0), column(1.0, 2.0, 3.0)
    weight, z = column(1.0, 1.0, 1.0), x
    result = train(Gossip(graph, SGP()), x, b=b, steps=2, lr=lr)
    for step in range(2):
        x = p @ (x - lr * (z - b))
        weight = p @ weight
        z = x / weight
        for rank in range(3):
            assert torch.allclose(result.history[rank, step], z[rank])


def test_reaches_the_average_with_columns_only(train, vectors, given):
    x = vectors(3)
    result = train(Gossip(directed(given), SGP()), x, b=x, lr=0.0, steps=80)
    assert torch.allclose(result.params, x.mean(0).expand(3, -1), atol=1e-12)


def test_the_sum_of_the_weights_stays(train, vectors, given):
    for graph in (directed(given),):
        result = train(Gossip(graph, SGP()), b=vectors(3), lr=0.1, steps=100)
        weights = torch.stack([replica.memory["push_weight"] for replica in result.replicas])
        assert abs(float(weights.sum()) - 3) < 1e-12
        assert (weights - 1).abs().max() > 0.05  # they do differ
    result = train("gossip(one_peer_exponential, sgp)", b=vectors(7), lr=0.1, steps=100)
    weights = torch.stack([replica.memory["push_weight"] for replica in result.replicas])
    assert abs(float(weights.sum()) - 7) < 1e-12


def test_the_mean_follows_sgd(train, vectors, given):
    # Gradients are linear here, and all workers have the same curvature; z and x have one limit.
    b = vectors(3)
    result = train(Gossip(directed(given), SGP()), b=b, lr=0.02, steps=600)
    assert (result.params.mean(0) - b.mean(0)).abs().max() < 0.05
