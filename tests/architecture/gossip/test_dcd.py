import pytest
import torch

from gradwire.architecture.gossip.dcd import DCD
from gradwire.architecture.gossip.gossip import Gossip
from gradwire.architecture.graphs.ring import Ring


@pytest.mark.filterwarnings("ignore:.*unbiased codecs")
def test_two_steps_by_hand(train, path):
    # Top-1 of two: of each change only its larger entry is made.
    kicks = torch.tensor([[3.0, 1.0], [0.0, 6.0], [0.0, 0.0]], dtype=torch.float64)
    one = torch.tensor([[3.0, 0.0], [0.0, 6.0], [0.0, 0.0]], dtype=torch.float64)
    result = train(Gossip(path, DCD()), kicks=kicks, steps=2, compression="topk(0.5)")
    change = path.matrix(3) @ one - one  # rows (-1, 2), (1, -4), (0, 2)
    kept = torch.tensor([[0.0, 2.0], [0.0, -4.0], [0.0, 2.0]], dtype=torch.float64)
    assert torch.allclose(change.abs().amax(1), kept.abs().amax(1))
    assert torch.allclose(result.params, one + kept)


def test_neighbours_know_the_model_exactly(train, vectors):
    result = train("gossip(ring, dcd)", b=vectors(5), steps=6, lr=0.1, compression="qsgd(4)")
    for rank in range(5):
        held = result.replicas[(rank + 1) % 5].memory[f"estimate {rank}"]
        assert torch.equal(held, result.params[rank])
        assert not Gossip(Ring(), DCD()).owed(result.replicas[rank]).any()


def test_with_an_unbiased_codec_it_comes_near_dpsgd(train, vectors):
    b = vectors(5, 40)
    exact = train("gossip(ring)", b=b, steps=80, lr=0.1)
    dcd = train("gossip(ring, dcd)", b=b, steps=80, lr=0.1, compression="qsgd(6)")
    # The error of a change is relative to the change, so it dies out with them.
    assert (dcd.params - exact.params).norm() < 0.02 * exact.params.norm()


def test_without_loss_it_is_dpsgd(train, vectors):
    b = vectors(4)
    exact = train("gossip(ring)", b=b, steps=9, lr=0.1)
    dcd = train("gossip(ring, dcd)", b=b, steps=9, lr=0.1)
    assert torch.allclose(dcd.params, exact.params, atol=1e-13)
