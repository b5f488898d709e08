"""Asynchronous SGD: staleness and trajectories by hand."""

import pytest
import torch

from gradwire.training.optimizer import SGD, Adam


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.1)], ids=repr)
def test_one_worker_is_sgd(train, optimizer, servers) -> None:
    trained = train("asp", f"parameter_server({servers})", workers=1, optimizer=optimizer)
    x = trained.initial
    state = optimizer.init(x)
    for _ in range(10):
        x, state = optimizer.update(x, trained.gradient(0, x), state, optimizer.lr)
    assert torch.equal(trained.params[0], x)
    assert torch.equal(torch.cat([server.params for server in trained.servers]), x)
    assert trained.servers[0].noted["staleness"] == [0] * 10


@pytest.mark.parametrize("workers", [2, 5])
def test_equally_fast_workers_have_the_staleness_of_all_others(train, workers) -> None:
    # All push at once: the first sees no update, the second one, ... From then on every worker's
    # gradient is taken after one of each other worker.
    trained = train("asp", "parameter_server", workers=workers, steps=4)
    others = workers - 1
    expected = [*range(workers), *[others] * (3 * workers)]
    assert trained.servers[0].noted["staleness"] == expected


def test_two_workers_by_hand(train) -> None:
    trained = train("asp", "parameter_server", workers=2, steps=2, lr=0.1)
    x0, g = trained.initial, trained.gradient
    x1 = x0 - 0.1 * g(0, x0)  # goes to worker 0
    x2 = x1 - 0.1 * g(1, x0)  # goes to worker 1
    x3 = x2 - 0.1 * g(0, x1)
    x4 = x3 - 0.1 * g(1, x2)
    torch.testing.assert_close(trained.params[0], x3, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trained.params[1], x4, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(trained.servers[0].params, x4, rtol=1e-12, atol=1e-12)


def test_steps_are_divided_by_the_staleness_above_one(train) -> None:
    trained = train("asp(scale_by_staleness=True)", "parameter_server", workers=3, steps=2)
    x, g = [trained.initial], trained.gradient
    x.append(x[0] - 0.1 * g(0, x[0]))
    x.append(x[1] - 0.1 * g(1, x[0]))
    x.append(x[2] - 0.05 * g(2, x[0]))  # two updates late
    x.append(x[3] - 0.05 * g(0, x[1]))
    x.append(x[4] - 0.05 * g(1, x[2]))
    x.append(x[5] - 0.05 * g(2, x[3]))
    assert trained.servers[0].noted["staleness"] == [0, 1, 2, 2, 2, 2]
    torch.testing.assert_close(trained.servers[0].params, x[6], rtol=1e-12, atol=1e-12)


def test_nobody_waits(train) -> None:
    # Worker 0 needs three times as long: the others do not notice.
    slow = train(
        "asp", "parameter_server", workers=3, steps=9, stragglers="always((0,), slowdown=3.0)"
    )
    fast = train("asp", "parameter_server", workers=3, steps=9)
    assert slow.time_s == pytest.approx(9 * 0.03, rel=0.05)
    assert sorted(slow.engine.clocks[:3])[:2] == pytest.approx([fast.time_s] * 2, rel=0.01)


@pytest.mark.parametrize("servers", [1, 2])
def test_goes_on_without_a_lost_worker_and_with_one_that_comes_back(train, servers) -> None:
    trained = train(
        "asp",
        f"parameter_server({servers})",
        workers=3,
        steps=60,
        faults=["crash(1, at=0.1)", "crash(2, at=0.2, rejoin=0.3)", "arrive(0, at=0.05)"],
        heartbeat_s=0.05,
    )
    assert [replica is None for replica in trained.replicas] == [False, True, False]
    assert (0, 59) in trained.after
    assert (2, 59) in trained.after


def test_is_refused_where_all_are_needed(train) -> None:
    with pytest.raises(ValueError, match=r"asp needs.*push_pull.*allreduce offers mean.*Try"):
        train("asp", "allreduce")
