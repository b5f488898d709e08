import pytest
import torch


def slow(rank, step):
    """Every worker has a speed of its own."""
    return 0.01 * (1 + 0.37 * rank + 0.11 * ((step * 7 + rank) % 5))


def settled(result):
    return torch.stack([result.mixings[rank].params for rank in sorted(result.mixings)])


@pytest.mark.parametrize("graph", ["ring", "complete", "star", "torus"])
def test_averaging_keeps_the_sum_on_any_graph(graph, train, vectors):
    x = vectors(6)
    result = train(
        f"gossip({graph}, adpsgd)", kicks=x, steps=60, synchronization="asp", seconds=slow
    )
    final = settled(result)
    assert torch.allclose(final.mean(0), x.mean(0), atol=1e-13)
    assert (final - x.mean(0)).abs().max() < 0.02 * (x - x.mean(0)).abs().max()


def test_two_workers_by_hand(train):
    x = torch.tensor([[0.0], [8.0]], dtype=torch.float64)
    b = torch.tensor([[0.0], [10.0]], dtype=torch.float64)
    # Both ask at once, rank 0's request counts: both have the average, then add their steps.
    # Gradients are those at 0 and 8, which were read before.
    result = train("gossip(ring, adpsgd)", x, b=b, steps=1, lr=0.5, synchronization="asp")
    assert torch.allclose(settled(result), torch.tensor([[4.0], [5.0]]).double())


def test_a_stale_gradient_by_hand(train):
    # Rank 1 reads 8 and computes for a second. Meanwhile rank 0 averages with it three times.
    x = torch.tensor([[0.0], [8.0]], dtype=torch.float64)
    settings = {"synchronization": "asp", "seconds": lambda rank, step: 0.01 + rank}
    result = train("gossip(ring, adpsgd)", x, b=x, steps=3, lr=0.0, **settings)
    # Rank 0: (0 + 8) / 2; its later requests find 4 at the other side.
    assert torch.allclose(result.history[0, 2], torch.tensor([4.0]).double())
    stale = train("gossip(ring, adpsgd)", x, b=0 * x, steps=1, lr=0.5, **settings)
    # Rank 1 applies the gradient at 8 to the 4 it has by then.
    assert torch.allclose(stale.history[1, 0], torch.tensor([0.0]).double())


def staleness(replica):
    names = ("staleness_sum", "staleness_max", "staleness_count")
    return [int(replica.memory[name]) for name in names]


def test_staleness_by_hand(train):
    x = torch.tensor([[0.0], [8.0]], dtype=torch.float64)
    settings = {"synchronization": "asp", "seconds": lambda rank, step: 0.01 + rank}
    result = train("gossip(ring, adpsgd)", x, b=x, steps=3, lr=0.1, **settings)
    # Rank 0 is done before rank 1 has its first gradient. In its first step both ask at once, and
    # its own request counts: one move each step. The model of rank 1 is moved by these three.
    assert staleness(result.replicas[0]) == [3, 1, 3]
    # Later rank 1 asks, and is moved by that alone.
    assert staleness(result.replicas[1]) == [3 + 1 + 1, 3, 3]


def test_alone_nothing_is_stale(train, vectors):
    result = train("gossip(ring, adpsgd)", b=vectors(1), steps=4, lr=0.1, synchronization="asp")
    assert staleness(result.replicas[0]) == [0, 0, 4]


def test_nobody_waits_for_a_slow_worker(train, vectors):
    x = vectors(4)

    def seconds(rank, step):
        return 1.0 if rank == 3 else 0.01

    result = train(
        "gossip(ring, adpsgd)", b=x, steps=10, lr=0.1, synchronization="asp", seconds=seconds
    )
    assert max(result.engine.clocks[:3]) < 1.0
    assert result.engine.clocks[3] == pytest.approx(10.0, abs=0.2)


def test_trains_to_the_neighbourhood_of_the_optimum(train, vectors):
    # Of equal speed on average: else the fast ones would count more.
    b = vectors(6)
    settings = {"synchronization": "asp", "seconds": lambda rank, step: slow(0, step + rank)}
    result = train("gossip(complete, adpsgd)", b=b, steps=300, lr=0.02, **settings)
    assert (settled(result) - b.mean(0)).norm() < 0.1 * (b - b.mean(0)).norm()


def test_one_worker_is_sgd(train, vectors):
    b = vectors(1)
    result = train("gossip(ring, adpsgd)", b=b, steps=5, lr=0.1, synchronization="asp")
    assert torch.allclose(result.params, b * (1 - 0.9**5), atol=1e-14)


def test_runs_are_deterministic(train, vectors):
    b = vectors(5)
    settings = {"b": b, "steps": 20, "lr": 0.1, "synchronization": "asp", "seconds": slow}
    first = train("gossip(ring, adpsgd)", **settings)
    second = train("gossip(ring, adpsgd)", **settings)
    assert torch.equal(first.params, second.params)
