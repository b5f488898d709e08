import warnings

import pytest
import torch

from gradwire.architecture.gossip.choco import Choco
from gradwire.architecture.gossip.gossip import Gossip
from gradwire.core.errors import GradwireWarning


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_a_step_by_hand(train, path):
    # Top-1 of two: of the change (3, 1) only the 3 is heard.
    kicks = torch.tensor([[3.0, 1.0], [0.0, 6.0], [0.0, 0.0]], dtype=torch.float64)
    result = train(Gossip(path, Choco(0.5)), kicks=kicks, steps=1, compression="topk(0.5)")
    heard = torch.tensor([[3.0, 0.0], [0.0, 6.0], [0.0, 0.0]], dtype=torch.float64)
    expected = kicks + 0.5 * (path.matrix(3) @ heard - heard)
    assert torch.allclose(result.params, expected)
    assert torch.equal(result.replicas[0].memory["estimate"], heard[0])
    assert torch.equal(result.replicas[0].memory["estimate 1"], heard[1])


def test_what_a_worker_owes_is_what_nobody_heard(train, path):
    kicks = torch.tensor([[3.0, 1.0], [0.0, 6.0], [0.0, 0.0]], dtype=torch.float64)
    gossip = Gossip(path, Choco(0.5))
    result = train(gossip, kicks=kicks, steps=1, compression="topk(0.5)")
    # Rank 0 told (3, 0) of (3, 1), then went half of W xhat - xhat = (-1, 2).
    owed = gossip.owed(result.replicas[0])
    assert torch.allclose(owed, torch.tensor([-0.5, 2.0], dtype=torch.float64))


def test_gossip_reaches_the_exact_average_where_naive_compression_does_not(train, vectors):
    x = vectors(5, 20)
    away = (x - x.mean(0)).abs().max()
    choco = train("gossip(ring, choco(0.3))", kicks=x, steps=300, compression="topk(0.2)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradwireWarning)
        naive = train("gossip(ring)", kicks=x, steps=300, compression="topk(0.2)")
    assert torch.allclose(choco.params.mean(0), x.mean(0), atol=1e-12)
    assert (choco.params - x.mean(0)).abs().max() < 1e-6 * away
    assert (naive.params - x.mean(0)).abs().max() > 0.1 * away


def test_what_neighbours_hold_of_each_other_is_equal(train, vectors):
    b = vectors(5, 20)
    result = train("gossip(ring, choco(0.3))", b=b, steps=5, lr=0.1, compression="qsgd(4)")
    for rank, replica in enumerate(result.replicas):
        for other in ((rank + 1) % 5, (rank - 1) % 5):
            held = result.replicas[other].memory[f"estimate {rank}"]
            assert torch.equal(held, replica.memory["estimate"])


def test_bytes_are_those_of_payloads(train, vectors):
    b = vectors(4, 1000)
    result = train("gossip(ring, choco(0.3))", b=b, steps=3, lr=0.1, compression="topk(0.01)")
    per_message = result.engine.ledger.total_bytes / result.engine.ledger.total_messages
    assert result.engine.ledger.total_messages == 3 * 4 * 2
    assert per_message < 1000 * 8 * 0.03


def test_gamma_is_checked():
    for gamma in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="gamma"):
            Choco(gamma)
