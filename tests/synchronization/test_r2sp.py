"""Round-robin: a fixed order, the same staleness for all, and exchanges that do not collide."""

import pytest
import torch

from gradwire.core.wire import HEADER_NBYTES


@pytest.mark.parametrize("servers", [1, 2])
def test_the_order_is_fixed_whatever_workers_take(train, servers) -> None:
    architecture = f"parameter_server({servers})"
    settings = {"workers": 3, "steps": 6, "momentum": 0.9}
    fixed = train("r2sp", architecture, **settings)
    for compute in ("exponential(0.01)", "per_node((fixed(0.05), fixed(0.01), fixed(0.02)))"):
        other = train("r2sp", architecture, compute=compute, **settings)
        assert other.time_s != fixed.time_s
        assert all(torch.equal(a, b) for a, b in zip(fixed.params, other.params))
    assert fixed.servers[0].noted["staleness"] == [0, 1, 2, *[2] * 15]


def test_three_workers_by_hand(train) -> None:
    trained = train("r2sp", "parameter_server", workers=3, steps=2, compute="exponential(0.01)")
    g, seen, x = trained.gradient, [trained.initial] * 3, trained.initial
    for _ in range(2):
        for rank in range(3):
            x = seen[rank] = x - 0.1 * g(rank, seen[rank])
    for own, expected in zip(trained.params, seen):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


def test_exchanges_of_equal_workers_do_not_collide(train) -> None:
    # Once in order, a step takes its compute time and one exchange with nobody in the way.
    settings = {"workers": 6, "layers": (100_000,), "compute": "fixed(0.01)"}
    times = [train("r2sp", "parameter_server", steps=n, **settings).time_s for n in (3, 7)]
    message = 8 * 100_000 + HEADER_NBYTES
    exchange = 2 * (50e-6 + message / 1.25e9)
    assert times[1] - times[0] == pytest.approx(4 * (0.01 + exchange), rel=1e-3)
    bsp = [
        train("bsp", 'parameter_server(optimizer="server")', steps=n, **settings).time_s
        for n in (3, 7)
    ]
    crowd = 2 * 50e-6 + 7 * message / 1.25e9  # all six answers after the last push
    assert bsp[1] - bsp[0] == pytest.approx(4 * (0.01 + crowd), rel=1e-3)


@pytest.mark.parametrize("servers", [1, 3])
def test_who_is_not_there_has_no_turn(train, servers) -> None:
    trained = train(
        "r2sp",
        f"parameter_server({servers})",
        workers=4,
        steps=60,
        compute="exponential(0.01)",
        faults=["crash(1, at=0.1)", "crash(2, at=0.2, rejoin=0.4)", "arrive(0, at=0.05)"],
        heartbeat_s=0.05,
    )
    assert [replica is None for replica in trained.replicas] == [False, True, False, False]
    for rank in (0, 2, 3):
        assert (rank, 59) in trained.after


def test_is_refused_where_all_are_needed(train) -> None:
    with pytest.raises(ValueError, match=r"r2sp needs.*push_pull; ring offers mean"):
        train("r2sp", "ring")
