"""Local SGD: rounds by hand, period 1 is bsp, the three ways with momentum, and what becomes of
what compression leaves out."""

import pytest
import torch

from gradwire.training.optimizer import Adam

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def test_two_rounds_by_hand(train):
    """Two workers, f_1 = x^2/2 from 4 and f_2 = (x - 2)^2, rate 1/2, period 2."""
    trained = train(
        "localsgd(2)",
        workers=2,
        steps=4,
        lr=0.5,
        layers=(1,),
        curvatures=(1.0, 2.0),
        minima=torch.tensor([[0.0], [2.0]]),
        start=torch.tensor([4.0]),
    )
    # Worker 1: 4 -> 2 -> 1; worker 2 jumps to 2 and stays; mean 1.5. Then 0.375 and 2: 1.1875.
    assert trained.after[0, 1].params.item() == 1.5
    assert trained.after[1, 1].params.item() == 1.5
    assert [params.item() for params in trained.params] == [1.1875, 1.1875]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["local", "average"])
def test_period_one_is_bsp(train, momentum, kind):
    """Momentum is linear, so the mean of local momenta is the momentum of the mean."""
    wanted = train("bsp", momentum=momentum)
    trained = train(f'localsgd(1, momentum="{kind}")', momentum=momentum)
    for params in trained.params:
        torch.testing.assert_close(params, wanted.params[0], **EXACT)


def test_agrees_after_each_round_and_in_the_last_step(train):
    trained = train("localsgd(3)", steps=8)
    for step in (2, 5, 7):
        params = [trained.after[rank, step].params for rank in range(4)]
        assert all(torch.equal(params[0], other) for other in params)
        assert torch.equal(trained.after[0, step].memory["anchor"], params[0])
    assert not torch.equal(trained.after[0, 3].params, trained.after[1, 3].params)
    assert trained.engine.ledger.tensor_bytes["model"] == 3 * 2 * 3 * 8 * 8


def test_averaged_momentum_is_that_of_the_mean(train):
    """One more step after a round starts from the mean of the momenta."""
    trained = train('localsgd(3, momentum="average")', momentum=0.9, steps=3)
    alone = [
        train(
            "localsgd(3)",
            momentum=0.9,
            steps=3,
            workers=1,
            curvatures=[float(trained.curvatures[rank])],
            minima=trained.minima[rank : rank + 1],
            start=trained.initial,
        ).replicas[0]
        for rank in range(4)
    ]
    wanted = sum(replica.optimizer["momentum"] for replica in alone) / 4
    for replica in trained.replicas:
        torch.testing.assert_close(replica.optimizer["momentum"], wanted, **EXACT)
    # Once more the model, uncompressed: that is what it costs.
    ledger = trained.engine.ledger.tensor_bytes
    assert ledger["momentum"] == ledger["model"]


def test_reset_forgets_the_momentum(train):
    trained = train('localsgd(2, momentum="reset")', momentum=0.9, steps=6)
    for replica in trained.replicas:
        assert not replica.optimizer["momentum"].any()
    assert trained.engine.ledger.tensor_bytes.keys() == {"model"}


def test_moments_of_adam(train):
    trained = train('localsgd(2, momentum="average")', optimizer=Adam(0.1), steps=4)
    first = trained.replicas[0].optimizer
    for replica in trained.replicas:
        assert torch.equal(replica.optimizer["mean"], first["mean"])
        assert torch.equal(replica.optimizer["square"], first["square"])
        assert replica.optimizer["step"] == 4
    trained = train('localsgd(2, momentum="reset")', optimizer=Adam(0.1), steps=4)
    assert trained.replicas[0].optimizer["step"] == 0


def test_a_bad_gradient_is_left_out(train):
    trained = train("localsgd(2)", steps=4, bad=[(1, 0)], nonfinite="skip")
    assert [replica.num_dropped for replica in trained.replicas] == [0, 1, 0, 0]
    assert all(torch.isfinite(params).all() for params in trained.params)


def test_periods_that_change(train):
    """Every step knows its own period: 1 first, 4 from step 4 on."""
    trained = train("localsgd(ramp(1, 4, steps=4, hold=4))", steps=12)
    sums = [trained.after[0, step].memory["anchor"].sum().item() for step in range(12)]
    changed = [step for step in range(1, 12) if sums[step] != sums[step - 1]]
    assert changed == [1, 2, 3, 7, 11]


def kept_rounds(train, architecture="allreduce", **settings):
    """Two workers, f_1 = |x|^2/2 and f_2 = |x - (8, 2)|^2/2, both from (4, 4), rate 1/2."""
    return train(
        'localsgd(1, unsent="kept")',
        architecture,
        "topk(0.5)",
        workers=2,
        lr=0.5,
        layers=(2,),
        curvatures=(1.0, 1.0),
        minima=torch.tensor([[0.0, 1.0], [8.0, 2.0]]),
        start=torch.tensor([4.0, 4.0]),
        **settings,
    )


@pytest.mark.parametrize("architecture", ["allreduce", "ring", "parameter_server"])
def test_unsent_is_kept_by_hand(train, architecture):
    """Walks (-2, -1.5) and (2, -1): both send the first, 0 on average, and keep the second."""
    trained = kept_rounds(train, architecture, steps=2)
    first, second = trained.after[0, 0], trained.after[1, 0]
    assert first.memory["anchor"].tolist() == second.memory["anchor"].tolist() == [4.0, 4.0]
    assert first.params.tolist() == [4.0, 2.5]
    assert second.params.tolist() == [4.0, 3.0]
    # The next walks, (-2, -2.25) and (2, -1.5), contain what was kept: worker 1 now sends its
    # second element, worker 2 its first again. Means: (1, -1.125).
    first, second = trained.after[0, 1], trained.after[1, 1]
    assert first.memory["anchor"].tolist() == second.memory["anchor"].tolist() == [5.0, 2.875]
    assert first.params.tolist() == [3.0, 2.875]
    assert second.params.tolist() == [5.0, 1.375]
    assert trained.agreed.tolist() == [5.0, 2.875]


def test_unsent_is_lost_by_hand(train):
    trained = train(
        "localsgd(1)",
        "allreduce",
        "topk(0.5)",
        workers=2,
        steps=1,
        lr=0.5,
        layers=(2,),
        curvatures=(1.0, 1.0),
        minima=torch.tensor([[0.0, 1.0], [8.0, 2.0]]),
        start=torch.tensor([4.0, 4.0]),
    )
    assert [params.tolist() for params in trained.params] == [[4.0, 4.0], [4.0, 4.0]]


@pytest.mark.parametrize("architecture", ["allreduce", "parameter_server(2)"])
@pytest.mark.parametrize("scheduling", ["sequential", 'sequential("layer")'])
@pytest.mark.parametrize("compression", ["topk(0.3)", "qsgd(bits=4)", "sign"])
def test_what_a_model_is_off_the_anchor_was_not_sent(train, architecture, scheduling, compression):
    """All walks together are in the anchor, or still in the models: on average, and so in sum."""
    trained = train(
        'localsgd(2, unsent="kept")', architecture, compression, steps=6, scheduling=scheduling
    )
    walked = torch.zeros(4, 8, dtype=torch.float64)
    for rank in range(4):
        before = trained.initial
        for step in range(6):
            gradient = trained.gradient(rank, before)
            walked[rank] -= 0.1 * gradient
            before = trained.after[rank, step].params
    off = torch.stack([params - trained.agreed for params in trained.params])
    assert off.abs().max() > 0.01
    torch.testing.assert_close(trained.agreed + off.mean(0), trained.initial + walked.mean(0))


def test_nothing_unsent_is_nothing_kept(train):
    lost = train("localsgd(3)", steps=8, noise=0.1, momentum=0.9)
    kept = train('localsgd(3, unsent="kept")', steps=8, noise=0.1, momentum=0.9)
    for one, other in zip(lost.params, kept.params):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "compression",
    [
        "ef(topk(0.5))",
        "dgc(0.5)",
        "diana(qsgd(4))",
        'partition({"layer 0": "identity", "*": "ef(sign)"})',
        "ef(topk(ramp(0.5, 0.1, steps=4)))",
    ],
)
def test_keeps_unsent_once_only(train, compression):
    with pytest.raises(ValueError, match="would be sent twice"):
        train('localsgd(2, unsent="kept")', compression=compression)


def test_neighbours_have_their_own_ways_with_what_is_unsent(train):
    with pytest.raises(ValueError, match="Neighbours agree on no common model"):
        train('localsgd(2, unsent="kept")', "gossip(ring)", "topk(0.5)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("localsgd(0)", "at least 1"),
        ('localsgd(2, momentum="global")', "must be one of"),
        ('localsgd(2, unsent="dropped")', "must be one of"),
    ],
)
def test_refuses(train, text, message):
    with pytest.raises(ValueError, match=message):
        train(text)
