import pytest
import torch

from gradwire.architecture.gossip.dpsgd import DPSGD
from gradwire.architecture.gossip.gossip import Gossip


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_two_steps_by_hand(train, path):
    # f_i = |x - b_i|^2 / 2, lr 1/2, from x = 3, 6, 9 with b = 1, 2, 3.
    x, b = column(3.0, 6.0, 9.0), column(1.0, 2.0, 3.0)
    one = train(Gossip(path, DPSGD()), x, b=b, steps=1, lr=0.5)
    # W x = 4, 6, 8; the gradients are those at x: 2, 4, 6.
    assert torch.allclose(one.params, column(3.0, 4.0, 5.0))
    two = train(Gossip(path, DPSGD()), x, b=b, steps=2, lr=0.5)
    # W x = 10/3, 4, 14/3; gradients 2, 2, 2.
    assert torch.allclose(two.params, column(7 / 3, 3.0, 11 / 3))


def test_models_travel_while_gradients_are_computed(train, vectors):
    # 10 ms of computing, 1 ms of latency and 2 x 0.8 ms for two messages of 100 kB.
    x = vectors(4, 12_500)

    def step_s(algorithm):
        result = train(f"gossip(ring, {algorithm})", x, steps=1, seconds=lambda rank, step: 0.01)
        return result.engine.now

    message_s = (12_500 * 8 + 8) * 8 / 1e9
    travel_s = 0.001 + 2 * message_s
    assert step_s("dpsgd") == pytest.approx(0.01)
    assert step_s("diffusion") == pytest.approx(0.01 + travel_s)
    assert step_s("subgradient") == pytest.approx(0.01 + travel_s)


def test_with_a_slow_network_gradients_are_free(train, vectors):
    x = vectors(4, 12_500)
    result = train("gossip(ring)", x, steps=1, latency="50ms", seconds=lambda rank, step: 0.01)
    assert result.engine.now == pytest.approx(0.05 + 2 * (12_500 * 8 + 8) * 8 / 1e9)


def test_local_steps_add_up_to_one_walk(train, path):
    # Two steps of lr 1/2 from x lead a quarter of the way back to x: the walk is 3/4 (b - x).
    x, b = column(3.0, 6.0, 9.0), column(1.0, 2.0, 3.0)
    result = train(Gossip(path, DPSGD()), x, b=b, steps=2, lr=0.5, synchronization="localsgd(2)")
    assert torch.allclose(result.params, column(4 - 1.5, 6 - 3.0, 8 - 4.5))
