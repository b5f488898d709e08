"""LAQ: with no error it is LAG; its rule with errors, and its patience."""

from itertools import pairwise

import pytest
import torch

from gradwire.core.spec import Spec


def num_uploads(trained) -> list[int]:
    return [int(replica.memory["num_uploads"]) for replica in trained.replicas]


def test_without_errors_it_is_lag(train):
    lag, laq = train("lag(0.1)", steps=20), train("laq(0.1)", steps=20)
    assert torch.equal(lag.agreed, laq.agreed)
    assert num_uploads(lag) == num_uploads(laq)
    assert lag.sent_bytes == laq.sent_bytes


def test_the_rule_by_hand(train):
    """Eq. 7a, from what each worker knew before and after each step."""
    steps, lr, xi = 30, 0.1, 0.08
    trained = train(f"laq({xi})", compression="qsgd(bits=4)", steps=steps, lr=lr)
    seen = set()
    for rank in range(4):
        codec, key = trained.plan.reducer.codec, trained.plan.key.private(rank).child("model")
        heard, missed = torch.zeros(8, dtype=torch.float64), 0.0
        for step in range(steps):
            models = [trained.initial, *(trained.after[rank, s].params for s in range(step))]
            gradient = trained.gradient(rank, models[-1])
            change = gradient - heard
            payload, _ = codec.encode(change, codec.init(Spec.of(change)), key.at(step))
            told = codec.decode(payload, Spec.of(change), key.at(step))
            error = (change - told).square().sum().item()
            recent = models[-11:]
            moves = sum((a - b).square().sum() for a, b in pairwise(recent))
            bound = xi * moves / lr**2 + 3 * (error + missed)
            speaks = step == 0 or told.square().sum() > bound
            if speaks:
                heard, missed = heard + told, error
            seen.add(bool(speaks))
            torch.testing.assert_close(trained.after[rank, step].memory["sent"], heard)
    assert seen == {True, False}


def test_reaches_the_optimum_with_fewer_bytes(train):
    trained = train("laq(0.08)", compression="qsgd(bits=4)", steps=120, lr=0.1)
    torch.testing.assert_close(trained.agreed, trained.optimum, rtol=1e-3, atol=1e-3)
    dense = train("bsp", steps=120)
    assert trained.sent_bytes < dense.sent_bytes
    assert max(num_uploads(trained)) < 120


def test_patience(train):
    """Too lazy to speak: first and then after 3 silent steps each."""
    trained = train("laq(1000000.0, patience=3)", steps=10)
    assert num_uploads(trained) == [3] * 4
    spoke = [step for step in range(10) if trained.after[0, step].memory["num_silent"] == 0]
    assert spoke == [0, 4, 8]


def test_refuses(train):
    with pytest.raises(ValueError, match="patience"):
        train("laq(0.1, patience=0)")
