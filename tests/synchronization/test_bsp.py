"""Bulk-synchronous SGD on quadratics is gradient descent on their mean."""

import pytest
import torch

from gradwire.core.errors import PeerLost
from gradwire.synchronization.bsp import BSP
from gradwire.training.optimizer import SGD, Adam

SERVER = 'parameter_server({}, optimizer="server")'


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_is_gradient_descent_on_the_mean(train, workers):
    trained = train("bsp", workers=workers, steps=7, lr=0.2)
    x = trained.initial
    for _ in range(7):
        x = x - 0.2 * sum(trained.gradient(rank, x) for rank in range(workers)) / workers
    for params in trained.params:
        torch.testing.assert_close(params, x, rtol=1e-12, atol=1e-12)


def test_reaches_the_optimum_of_the_mean(train):
    trained = train("bsp", steps=200)
    torch.testing.assert_close(trained.agreed, trained.optimum, rtol=1e-12, atol=1e-12)


@pytest.mark.few
@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.1)], ids=repr)
@pytest.mark.parametrize("servers", [1, 3])
def test_it_does_not_matter_who_has_the_optimizer(train, servers, optimizer):
    expected = train("bsp", "allreduce", optimizer=optimizer)
    for architecture in (f"parameter_server({servers})", SERVER.format(servers)):
        for synchronization in ("bsp", "bsp(timeout=100.0)"):
            trained = train(synchronization, architecture, optimizer=optimizer)
            for params in trained.params:
                assert torch.equal(params, expected.params[0])
    assert torch.equal(torch.cat([server.params for server in trained.servers]), params)


def test_pauses_where_all_are_at_the_same_step(train):
    settings = {"momentum": 0.9, "compression": "ef(topk(0.3))"}
    architecture = 'parameter_server(2, optimizer="server", answers="compressed")'
    whole = train("bsp", architecture, **settings)
    parts = train("bsp", architecture, pause_at=(3, 4), **settings)
    assert torch.equal(whole.params[0], parts.params[0])
    assert BSP().pauses
    assert not BSP(backup=1).pauses
    assert not BSP(timeout=1.0).pauses


# Worker 2 takes 35 ms, the others 10: its gradients are always too late.
SLOW = {"workers": 3, "steps": 8, "compute": "per_node((fixed(0.01), fixed(0.01), fixed(0.035)))"}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("policy", ["bsp(backup=1)", "bsp(timeout=0.005)"])
def test_goes_on_without_the_slowest(train, policy, servers):
    trained = train(policy, f"parameter_server({servers})", **SLOW)
    x = trained.initial
    for _ in range(8):
        x = x - 0.1 * (trained.gradient(0, x) + trained.gradient(1, x)) / 2
    for params in trained.params:  # the last one, too, has pulled the model
        torch.testing.assert_close(params, x, rtol=1e-12, atol=1e-12)
    assert trained.servers[0].noted["gradients"] == [2] * 8
    assert [replica.num_gradients for replica in trained.replicas[:2]] == [8, 8]
    assert trained.replicas[2].num_gradients < 8
    fast = 8 * (0.01 if "backup" in policy else 0.015)
    assert max(trained.engine.clocks[:2]) == pytest.approx(fast, rel=0.03)


def test_a_timeout_counts_from_the_first_gradient_of_a_step(train):
    # Worker 1 comes 4 ms after worker 0 and is waited for, worker 2 is not.
    times = "per_node((fixed(0.01), fixed(0.014), fixed(0.0165)))"
    trained = train("bsp(timeout=0.006)", "parameter_server", workers=3, steps=1, compute=times)
    x, g = trained.initial, trained.gradient
    one = x - 0.1 * (g(0, x) + g(1, x)) / 2
    torch.testing.assert_close(trained.params[0], one)
    assert trained.engine.clocks[0] == pytest.approx(0.016, rel=0.01)
    # With a longer one nobody waits until it is over.
    trained = train("bsp(timeout=0.1)", "parameter_server", workers=3, steps=1, compute=times)
    assert trained.time_s == pytest.approx(0.0165, rel=0.01)
    assert trained.servers[0].noted["gradients"] == [3]


@pytest.mark.parametrize("scheduling", ["sequential", 'sequential("layer")'])
def test_a_timeout_ends_while_a_gradient_comes_in_pieces(train, scheduling):
    # Worker 1 needs a second for its 30 layers, of which one comes every 32 ms.
    slow = {"bandwidth": "10Gbit,4Mbit,10Gbit,10Gbit", "layers": (2000,) * 30}
    trained = train(
        "bsp(timeout=0.05)", "parameter_server", workers=2, steps=2, scheduling=scheduling, **slow
    )
    assert trained.servers[0].noted["gradients"] == [1, 1]
    assert trained.times[0, 0] == pytest.approx(0.061, rel=0.02)


def test_what_a_lost_worker_pushed_is_not_answered_when_it_is_back(train):
    # Worker 1 pushes at 10 ms, is lost and comes back before worker 0 pushes at 100 ms.
    trained = train(
        "bsp(backup=1)",
        "parameter_server",
        workers=3,
        steps=2,
        compute="per_node((fixed(0.1), fixed(0.01), fixed(0.5)))",
        faults=["crash(1, at=0.02, rejoin=0.095)"],
        heartbeat_s=0.01,
    )
    x, g = trained.initial, trained.gradient
    for _ in range(2):
        x = x - 0.1 * (g(0, x) + g(1, x)) / 2
    torch.testing.assert_close(trained.params[1], x, rtol=1e-12, atol=1e-12)
    assert trained.servers[0].noted["gradients"] == [2, 2]
    assert trained.replicas[1].num_gradients == 2
    assert not any(trained.engine._mailboxes[rank].inbox for rank in range(3))


def test_what_came_too_late_stays_in_the_feedback(train):
    trained = train("bsp(backup=1)", "parameter_server(2)", "ef(topk(0.3))", **SLOW)
    for state in trained.replicas[2].exchange:
        assert not state["residual"].any()  # as before the first push
    assert any(state["residual"].any() for state in trained.replicas[0].exchange)


@pytest.mark.few
@pytest.mark.parametrize("policy", ["bsp(backup=1)", "bsp(backup=3)", "bsp(timeout=0.01)"])
@pytest.mark.parametrize("servers", [1, 3])
def test_servers_may_take_different_workers(train, policy, servers):
    trained = train(
        policy,
        f"parameter_server({servers})",
        workers=5,
        steps=40,
        compute="exponential(0.01)",
        layers=(20_000, 20_000),
        bandwidth="1Gbit",
    )
    backup = 3 if "3" in policy else 1
    for server in trained.servers:
        assert server.memory["clock"] == 40
        assert len(server.noted["gradients"]) == 40
        if "backup" in policy:
            assert set(server.noted["gradients"]) == {5 - backup}


@pytest.mark.parametrize(
    "architecture", ["allreduce", "ring", "parameter_server(2)", SERVER.format(2)]
)
def test_a_lost_worker_ends_the_run(train, architecture):
    with pytest.raises(PeerLost, match=r"rank 1 crashed at 0.1 s, which was noticed at 0.2 s"):
        train(
            "bsp", architecture, workers=3, steps=80, faults=["crash(1, at=0.1)"], heartbeat_s=0.1
        )


@pytest.mark.few
@pytest.mark.parametrize("servers", [1, 2])
def test_policies_go_on_without_lost_workers(train, servers):
    architecture = f"parameter_server({servers})"
    settings = {"workers": 4, "steps": 60, "heartbeat_s": 0.1}
    one, two = ["crash(1, at=0.1)"], ["crash(1, at=0.1)", "crash(0, at=0.3)"]
    for policy, faults in [
        ("bsp(backup=1)", one),
        ("bsp(backup=2)", two),
        ("bsp(timeout=0.02)", two),
        ("bsp(backup=1, timeout=0.02)", two),
    ]:
        trained = train(policy, architecture, faults=faults, **settings)
        assert (2, 59) in trained.after
        assert trained.servers[0].memory["clock"] == 60
    with pytest.raises(PeerLost, match="rank 0 crashed"):
        train("bsp(backup=1)", architecture, faults=two, **settings)
    back = ["crash(1, at=0.1, rejoin=0.3)", "arrive(3, at=0.2)"]
    trained = train("bsp(backup=2)", architecture, faults=back, **settings)
    assert (1, 59) in trained.after
    assert (3, 59) in trained.after


def test_errors(train):
    with pytest.raises(ValueError, match="backup must be at least 0, got -1"):
        BSP(-1)
    with pytest.raises(ValueError, match=r"timeout must be at least 0 and finite, got -0\.5"):
        BSP(timeout=-0.5)
    with pytest.raises(ValueError, match=r"timeout must be at least 0 and finite, got inf"):
        BSP(timeout=float("inf"))
    with pytest.raises(ValueError, match=r"does without 3 of 3 workers"):
        train("bsp(backup=3)", "parameter_server", workers=3)
    with pytest.raises(ValueError, match=r"bsp\(1\) needs.*push_pull; allreduce offers mean"):
        train("bsp(backup=1)", "allreduce")
