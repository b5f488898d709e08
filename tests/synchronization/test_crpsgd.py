"""Growing batches: where rounds end, what they compute, and how few there are."""

import math

import pytest
import torch

from gradwire.synchronization.crpsgd import CRPSGD

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def ends(method: CRPSGD, num_steps: int) -> list[int]:
    return [step for step in range(num_steps) if method.ends_round(step, num_steps)]


def test_rounds_by_hand():
    """Batches of 1, 1, 2, 3, 5, 7 (powers of 1.5, rounded down), and what is left."""
    assert ends(CRPSGD(1.5), 20) == [0, 1, 3, 6, 11, 18, 19]
    assert ends(CRPSGD(1.5, most=3), 14) == [0, 1, 3, 6, 9, 12, 13]
    assert ends(CRPSGD(2.0), 7) == [0, 2, 6]
    assert ends(CRPSGD(1.0), 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("growth", [1.1, 1.5, 2.0])
def test_rounds_are_logarithmic(growth):
    """growth^R / growth of the last round is at most T, up to the rounding down of batches."""
    for num_steps in (100, 1000, 10_000):
        most = math.log(num_steps * growth) / math.log(growth) + 2
        assert len(ends(CRPSGD(growth), num_steps)) <= most


def test_is_gradient_descent_once_per_round(train):
    """Without noise all mini-batches of a round have the same gradient."""
    trained = train("crpsgd(2.0)", steps=17)  # rounds of 1, 2, 4, 8, and 2 that are left
    wanted = train("bsp", steps=5)
    for params in trained.params:
        torch.testing.assert_close(params, wanted.params[0], **EXACT)
    assert trained.sent_bytes == wanted.sent_bytes
    assert all(replica.num_gradients == 17 for replica in trained.replicas)


def test_the_batch_is_averaged(train):
    """One round of 2 mini-batches by hand, with noise."""
    trained = train("crpsgd(2.0)", steps=3, noise=1.0, workers=2)
    x = trained.after[0, 0].params
    key, gradients = trained.plan.key, []
    for rank in range(2):
        for step in (1, 2):
            noise = key.at(step).private(rank).child("noise").normal(8).double()
            gradients.append(trained.gradient(rank, x) + noise)
    torch.testing.assert_close(trained.agreed, x - 0.1 * sum(gradients) / 4, **EXACT)


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "compression": "ef(topk(0.25))"},
        {"compression": "dgc(topk(0.25), momentum=0.9)", "local_decay": 0.1, "clip_norm": 1.0},
    ],
)
def test_growth_one_is_bsp(train, settings):
    settings = {"noise": 0.5, "local_clip": "clip_norm" in settings, **settings}
    trained, wanted = train("crpsgd(1.0)", **settings), train("bsp", **settings)
    assert torch.equal(trained.agreed, wanted.agreed)


def test_pauses_between_any_two_steps(train):
    whole = train("crpsgd(1.5)", steps=9, noise=1.0)
    parts = train("crpsgd(1.5)", steps=9, noise=1.0, pause_at=range(1, 9))
    assert torch.equal(whole.agreed, parts.agreed)
    assert whole.time_s == parts.time_s


def test_a_bad_gradient_is_left_out(train):
    """Step 1 of the round of steps 1 and 2 is bad on worker 1, whose other one counts."""
    trained = train("crpsgd(2.0)", steps=3, bad=[(1, 1)], nonfinite="skip")
    wanted = train("crpsgd(2.0)", steps=3)
    torch.testing.assert_close(trained.agreed, wanted.agreed, **EXACT)
    dropped = train("crpsgd(2.0)", steps=3, bad=[(1, 1), (1, 2)], nonfinite="skip")
    assert torch.equal(dropped.agreed, dropped.after[0, 0].params)
    with pytest.raises(ValueError, match="in the gradient of layer 0 on rank 1 in step 1"):
        train("crpsgd(2.0)", steps=3, bad=[(1, 1)])


@pytest.mark.parametrize("text", ["crpsgd(0.9)", "crpsgd(1.5, most=-1)"])
def test_refuses(train, text):
    with pytest.raises(ValueError, match=r"0\.9|-1"):
        train(text)
