"""Post-local SGD is bsp first and local SGD then; what feedback owes keeps its unit."""

import pytest
import torch

from gradwire.experiment.run.registries import OPTIMIZERS

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_is_bsp_before_and_localsgd_after(train, momentum):
    steps, start = 11, 4
    trained = train(f"postlocalsgd({start}, period=3)", steps=steps, momentum=momentum)
    bsp = train("bsp", steps=start, momentum=momentum)
    for rank in range(4):
        params = trained.after[rank, start - 1].params
        torch.testing.assert_close(params, bsp.params[rank], **EXACT)
    # Rounds count from the switch on: 4-6, 7-9, and what is left.
    x, v = bsp.params[0], [r.optimizer.get("momentum", 0.0) for r in bsp.replicas]
    for length in (3, 3, 1):
        own = [x] * 4
        for rank in range(4):
            for _ in range(length):
                v[rank] = momentum * v[rank] + trained.gradient(rank, own[rank])
                own[rank] = own[rank] - 0.1 * v[rank]
        x = sum(own) / 4
    for params in trained.params:
        torch.testing.assert_close(params, x, **EXACT)


def test_late_start_is_bsp_and_start_at_once_is_localsgd(train):
    late, bsp = train("postlocalsgd(10, period=3)"), train("bsp")
    torch.testing.assert_close(late.agreed, bsp.agreed, **EXACT)
    early, local = train("postlocalsgd(0, period=3)"), train("localsgd(3)")
    assert torch.equal(early.agreed, local.agreed)


@pytest.mark.parametrize("start", [0, 5, 10])
def test_what_feedback_owes_is_a_distance(train, start):
    """Steps taken and steps owed are all steps, wherever the switch is."""
    trained = train(
        f"postlocalsgd({start}, period=1)",
        compression="ef(topk(0.25))",
        lr=0.05,
        curvatures=[1e-9] * 4,  # with the minima so far away, all gradients are 1
        minima=torch.full((4, 8), -1e9),
        start=torch.zeros(8),
    )
    owed = sum(replica.exchange[0]["residual"] for replica in trained.replicas) / 4
    wanted = torch.full((8,), -0.05 * 10, dtype=torch.float64)
    assert owed.any()
    torch.testing.assert_close(trained.agreed + owed, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [("postlocalsgd(-1, period=2)", "not below 0"), ("postlocalsgd(3, period=0)", "at least 1")],
)
def test_refuses(train, text, message):
    with pytest.raises(ValueError, match=message):
        train(text)


def test_a_step_of_rate_zero_leaves_everything_as_it_is(train):
    """A warm-up from zero ends where one from almost zero does, feedback included."""

    def trained(first: str):
        return train(
            "postlocalsgd(1000, period=4)",
            compression="ef(topk(0.13))",
            optimizer=OPTIMIZERS.parse(f'sgd(ramp({first}, 0.1, steps=5, shape="linear"))'),
            steps=6,
            layers=(8,),
        )

    zero, tiny = trained("0.0"), trained("1e-12")
    assert torch.equal(zero.after[0, 0].params, zero.initial)
    torch.testing.assert_close(zero.agreed, tiny.agreed, rtol=0, atol=1e-9)
