import pytest
import torch

from gradwire.architecture.gossip.ecd import ECD
from gradwire.architecture.gossip.gossip import Gossip


@pytest.mark.filterwarnings("ignore:.*unbiased codecs")
def test_two_steps_by_hand(train, path):
    kicks = torch.tensor([[3.0, 1.0], [0.0, 6.0], [0.0, 0.0]], dtype=torch.float64)
    result = train(Gossip(path, ECD()), kicks=kicks, steps=2, compression="topk(0.5)")
    # t = 1: z = x'/2 with x' the kicks; top-1 leaves (1.5, 0) and (0, 3); y = 2 C(z).
    heard = torch.tensor([[3.0, 0.0], [0.0, 6.0], [0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(result.history[0, 0], kicks[0])
    # t = 2: x'' = W y, z = x'', y = C(x'').
    expected = path.matrix(3) @ heard
    assert torch.allclose(result.params, expected)
    kept = torch.tensor([2.0, 0.0], dtype=torch.float64)  # the first of two that are equal
    assert torch.allclose(result.replicas[0].memory["estimate"].abs().amax(), kept.amax())
    # Of (2, 2) one 2 is heard, the other is owed.
    owed = Gossip(path, ECD()).owed(result.replicas[0])
    assert torch.allclose(owed.abs().sort().values, torch.tensor([0.0, 2.0]).double())


def test_without_loss_it_is_dpsgd(train, vectors):
    b = vectors(4)
    exact = train("gossip(ring)", b=b, steps=9, lr=0.1)
    ecd = train("gossip(ring, ecd)", b=b, steps=9, lr=0.1)
    assert torch.allclose(ecd.params, exact.params, atol=1e-12)


def test_estimates_are_unbiased_and_good_with_bounded_errors(train, vectors):
    # lowprec-like rounding errors are bounded in absolute terms: the models follow dpsgd's.
    b = vectors(5, 40)
    exact = train("gossip(ring)", b=b, steps=60, lr=0.1)
    ecd = train("gossip(ring, ecd)", b=b, steps=60, lr=0.1, compression="qsgd(8)")
    assert (ecd.params - exact.params).norm() < 0.1 * exact.params.norm()
