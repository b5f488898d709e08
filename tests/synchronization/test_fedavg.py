"""Federated averaging: rounds, clients and weights by hand."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gradwire.core.errors import NonFiniteError
from gradwire.core.key import Key
from gradwire.core.protocols import Pulled, Push
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.synchronization.fedavg import FedAvg
from gradwire.training.schedule import Step

SERVERS = ["parameter_server", "parameter_server(3)"]
ALL = [*SERVERS, "allreduce"]


def model(trained):
    """The newest one."""
    if trained.servers:
        return torch.cat([server.params for server in trained.servers])
    fedavg = trained.plan.synchronization
    return fedavg.agreed(fedavg.newest(trained.replicas))


@pytest.mark.parametrize("architecture", ALL)
def test_all_clients_with_one_step_each_are_bsp(train, architecture) -> None:
    bsp = train("bsp", "allreduce")
    trained = train("fedavg(1.0)", architecture, num_examples=(4,) * 4, batch_size=4)
    torch.testing.assert_close(model(trained), bsp.params[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", ALL)
def test_walks_are_weighted_by_data_size(train, architecture) -> None:
    # 8 mini-batches per round on average: 4 and 12.
    sizes = (16, 48)
    trained = train(
        "fedavg(1.0)", architecture, workers=2, steps=16, num_examples=sizes, batch_size=4
    )
    x, g = trained.initial, trained.gradient
    for _ in range(2):
        ends = [x, x]
        for rank, num_steps in enumerate((4, 12)):
            for _ in range(num_steps):
                ends[rank] = ends[rank] - 0.1 * g(rank, ends[rank])
        x = x + 0.25 * (ends[0] - x) + 0.75 * (ends[1] - x)
    torch.testing.assert_close(model(trained), x, rtol=1e-12, atol=1e-12)
    assert [replica.num_gradients for replica in trained.replicas] == [8, 24]


@pytest.mark.parametrize("architecture", ALL)
def test_momentum_begins_anew_in_every_round(train, architecture) -> None:
    trained = train(
        "fedavg(1.0, epochs=3.0)",
        architecture,
        workers=2,
        steps=7,
        momentum=0.9,
        num_examples=(8, 8),
        batch_size=8,
    )
    x, g = trained.initial, trained.gradient
    for num_steps in (3, 3, 1):  # the last step ends the round
        ends = []
        for rank in range(2):
            y, velocity = x, torch.zeros_like(x)
            for _ in range(num_steps):
                velocity = 0.9 * velocity + g(rank, y)
                y = y - 0.1 * velocity
            ends.append(y)
        x = (ends[0] + ends[1]) / 2
    torch.testing.assert_close(model(trained), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", ALL)
def test_batches_go_on_and_rates_are_those_of_the_step(train, architecture) -> None:
    clip, sizes = 0.5, (8, 24)  # of 16 on average: one mini-batch in a round of 2 steps, and 3
    trained = train(
        "fedavg(1.0)",
        architecture,
        workers=2,
        steps=4,
        num_examples=sizes,
        batch_size=8,
        drift=0.3,
        clip_norm=clip,
        schedule=Step((1, 2, 3), 0.5),
    )
    x, batches = trained.initial, [0, 0]
    for number in range(2):
        ends = [x, x]
        for rank, places in enumerate(((1,), (0, 1, 1))):  # in which step of the round
            for place in places:
                gradient = trained.gradient(rank, ends[rank], batches[rank])
                assert gradient.norm() > clip
                rate = 0.1 * 0.5 ** (2 * number + place)
                ends[rank] = ends[rank] - rate * gradient * clip / gradient.norm()
                batches[rank] += 1
        x = x + 0.25 * (ends[0] - x) + 0.75 * (ends[1] - x)
    assert batches == [2, 6]
    torch.testing.assert_close(model(trained), x, rtol=1e-12, atol=1e-12)


def test_everyone_draws_the_same_clients() -> None:
    rounds = [FedAvg(0.3)._clients(Key(3), 10, number) for number in range(200)]
    assert rounds == [FedAvg(0.3)._clients(Key(3), 10, number) for number in range(200)]
    assert all(len(set(clients)) == 3 and clients == sorted(clients) for clients in rounds)
    counts = torch.bincount(torch.tensor(rounds).reshape(-1), minlength=10)
    assert counts.min() > 40  # 60 each on average, with a deviation of 6.5
    assert counts.max() < 80
    assert len(FedAvg(0.01)._clients(Key(3), 10, 0)) == 1


@pytest.mark.parametrize("architecture", ALL)
def test_the_clients_of_a_round_by_hand(train, architecture) -> None:
    sizes = (8, 16, 24, 32, 40)
    settings = {"workers": 5, "steps": 11, "num_examples": sizes, "batch_size": 8}
    trained = train("fedavg(0.4)", architecture, **settings)
    x, g, fedavg = trained.initial, trained.gradient, trained.plan.synchronization
    num_gradients = [0] * 5
    for number, places in enumerate((3, 3, 3, 2)):  # a round takes 3 steps
        clients = fedavg._clients(trained.plan.key, 5, number)
        walks = 0
        for rank in clients:
            y = x
            num_batches = places * (rank + 1) // 3
            num_gradients[rank] += num_batches
            for _ in range(num_batches):
                y = y - 0.1 * g(rank, y)
            walks = walks + sizes[rank] * (y - x)
        x = x + walks / sum(sizes[rank] for rank in clients)
    torch.testing.assert_close(model(trained), x, rtol=1e-12, atol=1e-12)
    assert [replica.num_gradients for replica in trained.replicas] == num_gradients


def test_servers_and_all_reduce_end_in_the_same_model(train) -> None:
    settings = {
        "workers": 6,
        "steps": 20,
        "momentum": 0.5,
        "num_examples": (8, 16, 24, 8, 8, 20),
        "batch_size": 8,
        "compute": "exponential(0.01)",
        "noise": 0.1,
    }
    models = [model(train("fedavg(0.5, epochs=1.5)", name, **settings)) for name in ALL]
    for other in models[1:]:
        torch.testing.assert_close(other, models[0], rtol=1e-10, atol=1e-10)
    for name in ALL:
        paused = train("fedavg(0.5, epochs=1.5)", name, pause_at=(1, 5, 13), **settings)
        whole = train("fedavg(0.5, epochs=1.5)", name, **settings)
        assert torch.equal(model(paused), model(whole))
        assert paused.sent_bytes == whole.sent_bytes


@pytest.mark.parametrize("architecture", ALL)
def test_who_is_not_drawn_sends_and_receives_nothing(train, architecture) -> None:
    trained = train("fedavg(0.4)", architecture, workers=5, steps=1)
    clients = trained.plan.synchronization._clients(trained.plan.key, 5, 0)
    links = trained.engine.ledger.link_bytes
    for rank in range(5):
        traffic = sum(links[rank]) + sum(row[rank] for row in links)
        assert (traffic > 0) == (rank in clients)
    if trained.servers:  # each client: a pull, a model of 64 bytes, and a walk with a payload's 16
        num_servers = len(trained.servers)
        assert sum(map(sum, links)) == 2 * ((32 + 32 + 32 + 16) * num_servers + 64 + 64)


@pytest.mark.few
@pytest.mark.parametrize("architecture", ALL)
def test_walks_can_be_compressed(train, architecture) -> None:
    minima = torch.arange(8.0).repeat(5, 1)
    trained = train(
        "fedavg(0.4, epochs=3.0)",
        architecture,
        "ef(topk(0.5))",
        workers=5,
        steps=150,
        minima=minima,
    )
    torch.testing.assert_close(model(trained), trained.optimum, rtol=1e-3, atol=1e-3)


def test_among_some_nothing_is_scattered(train) -> None:
    settings = {"compression": "ef(topk(0.5))", "workers": 5, "steps": 12, "layers": (50, 30)}
    scatter = train("fedavg(0.4)", 'allreduce("scatter")', **settings)
    gather = train("fedavg(0.4)", 'allreduce("gather")', **settings)
    assert torch.equal(model(scatter), model(gather))


def test_clients_of_a_torus_are_a_torus_of_their_own(train) -> None:
    settings = {"workers": 6, "steps": 6, "num_examples": (8, 16, 24, 8, 8, 20), "batch_size": 8}
    for fraction in (0.3, 0.5, 0.7, 1.0):
        torus = train(f"fedavg({fraction})", "torus2d(2, 3)", **settings)
        direct = train(f"fedavg({fraction})", "allreduce", **settings)
        torch.testing.assert_close(model(torus), model(direct), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("architecture", SERVERS)
def test_a_walk_that_is_not_finite_leads_nowhere(train, architecture) -> None:
    # The gradient of worker 1 is finite, a step with it is not.
    settings = {
        "workers": 2,
        "steps": 3,
        "lr": 1e10,
        "curvatures": [1e-10, 1.0],
        "minima": torch.tensor([[1.0], [1e300]], dtype=torch.float64).repeat(1, 8),
    }
    with pytest.raises(NonFiniteError, match=r"inf in the update of layer 0 on rank 1 in step 0"):
        train("fedavg(1.0)", architecture, **settings)
    trained = train("fedavg(1.0)", architecture, nonfinite="skip", **settings)
    assert torch.isfinite(model(trained)).all()
    assert [replica.num_dropped for replica in trained.replicas] == [0, 3]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_who_comes_back_goes_on_with_its_batches(train, fraction) -> None:
    settings = {"workers": 4, "steps": 30, "num_examples": (4, 4, 12, 4), "batch_size": 2}
    whole = train(f"fedavg({fraction})", "parameter_server(2)", **settings)
    faults = ["crash(2, at=0.055, rejoin=0.1)", "arrive(0, at=0.07)"]
    trained = train(f"fedavg({fraction})", "parameter_server(2)", faults=faults, **settings)
    for own, expected in zip(trained.replicas, whole.replicas):
        assert own.memory["batches"] == expected.memory["batches"]
    assert trained.replicas[2].num_gradients < whole.replicas[2].num_gradients


def test_who_comes_back_after_the_last_round_is_done(train) -> None:
    # There is no next round for it to wait for.
    for at in torch.arange(0.35, 0.5, 0.01).tolist():
        trained = train(
            "fedavg(0.5, epochs=3.0)",
            "parameter_server",
            steps=25,
            latency="50us,30ms,50us,10ms,1ms,50us",
            compute="exponential(0.01)",
            faults=[f"crash(1, at={at}, rejoin={at + 0.01})"],
            heartbeat_s=0.1,
        )
        assert all(trained.replicas[rank] is not None for rank in (0, 2, 3))


@dataclass(frozen=True, repr=False)
class Recorded(FedAvg):
    joins: list[Any] = field(default_factory=list, compare=False)  # what was pulled
    counted: list[bool] = field(default_factory=list, compare=False)  # each push

    async def resume(self, worker: Any, pulled: Pulled) -> Any:
        self.joins.append(pulled)
        return await super().resume(worker, pulled)

    async def serve(self, server: Any) -> None:
        span, event = self._span(server.num_examples, server.batch_size), server.event

        async def recorded(timeout_s: float | None = None) -> Any:
            got = await event(timeout_s)
            if isinstance(got, Push):
                self.counted.append(got.step // span == server.memory["round"])
            return got

        server.event = recorded
        await super().serve(server)


def test_servers_in_different_rounds_agree_on_who_takes_part(train) -> None:
    # Worker 2 needs 13 ms to push to a server: the second has its walk so much later. Worker 1
    # comes back in between, and is so slow that the first would not wait for its walk.
    fedavg = Recorded(1.0)
    for at in (0.25, 0.345, 0.35):
        train(
            fedavg,
            "parameter_server(2)",
            workers=3,
            steps=8,
            layers=(20_000, 20_000),
            bandwidth="10Gbit,10Gbit,100Mbit,10Gbit,10Gbit,10Gbit",
            compute="per_node((fixed(0.01), fixed(0.1), fixed(0.01)))",
            faults=[f"crash(1, at={at}, rejoin={at + 0.01})"],
            heartbeat_s=0.005,
        )
    assert all(pulled.clock != pulled.latest for pulled in fedavg.joins)
    assert all(fedavg.counted)


@pytest.mark.parametrize("servers", [1, 3])
def test_a_round_does_without_lost_clients(train, servers) -> None:
    trained = train(
        "fedavg(0.5)",
        f"parameter_server({servers})",
        workers=6,
        steps=60,
        num_examples=(8, 16, 24, 8, 8, 20),
        batch_size=4,
        compute="exponential(0.01)",
        faults=["crash(1, at=0.1)", "crash(2, at=0.2, rejoin=0.5)", "arrive(0, at=0.05)"],
        heartbeat_s=0.05,
    )
    assert [rank for rank, replica in enumerate(trained.replicas) if replica is None] == [1]
    for rank in (0, 2, 3, 4, 5):
        assert (rank, 59) in trained.after
    num_rounds = 60 // trained.plan.synchronization._span((8, 16, 24, 8, 8, 20), 4)
    assert all(server.memory["round"] >= num_rounds for server in trained.servers)


@pytest.mark.few
@pytest.mark.parametrize("partition", ["iid", "dirichlet(0.5)"])
@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.5])
def test_a_round_takes_as_many_steps_as_a_run_of_its_epochs(partition, epochs) -> None:
    config = Config(workers=4, batch_size=23, epochs=epochs, partition=partition, model="mlp((4,))")
    plan = prepare(config).plan
    mean = sum(plan.num_examples) / 4 / 23
    assert mean % 1 > 0.5  # an epoch has so many steps rounded down, not up
    span = FedAvg(1.0, epochs)._span(plan.num_examples, plan.batch_size)
    assert plan.num_steps == span == round(epochs * int(mean))


def test_errors(train) -> None:
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\], got 0"):
        FedAvg(0.0)
    with pytest.raises(ValueError, match="epochs must be above 0"):
        FedAvg(0.5, epochs=0.0)
    with pytest.raises(ValueError, match=r"powersgd\(1\) keeps what all workers must receive"):
        train("fedavg(0.5)", "allreduce", "powersgd(1)")
    with pytest.raises(
        ValueError, match=r'servers they hold its model: leave out optimizer="worker"'
    ):
        train("fedavg(0.5)", 'parameter_server(2, optimizer="worker")')
    with pytest.raises(ValueError, match="its numbers cannot change"):
        train("fedavg(ramp(0.1, 0.5, steps=10))", "allreduce")
