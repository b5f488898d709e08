"""Stale synchronous parallel: the bound, eq. 6 from recorded pushes, and bsp where s = 0."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.core.protocols import Push, Server
from gradwire.synchronization.ssp import SSP
from gradwire.training.optimizer import SGD, Adam
from gradwire.training.schedule import Step


class Recorder:
    """A server that writes down what it hears and says."""

    def __init__(self, server: Server, log: list[Any]) -> None:
        self.server = server
        self.log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    async def event(self, timeout_s: float | None = None) -> Any:
        event = await self.server.event(timeout_s)
        self.log.append(event)
        return event

    async def answer(
        self, rank: int, clock: int, *, accepted: bool = True, params: Tensor | None = None
    ) -> None:
        self.log.append((rank, clock, params))
        await self.server.answer(rank, clock, accepted=accepted, params=params)


@dataclass(frozen=True, repr=False)
class Recorded(SSP):
    logs: dict[int, list[Any]] = field(default_factory=dict, compare=False)

    async def serve(self, server: Any) -> None:
        await super().serve(Recorder(server, self.logs.setdefault(server.number, [])))


@pytest.mark.few(2)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("workers", [2, 5])
def test_the_fastest_is_at_most_s_ahead_and_sees_what_eq_6_says(
    train, workers, staleness, servers
) -> None:
    ssp = Recorded(staleness)
    trained = train(
        ssp,
        f"parameter_server({servers})",
        workers=workers,
        steps=40,
        compute="exponential(0.01)",
        layers=(4, 4),
    )
    for number, log in ssp.logs.items():
        width = 8 // servers
        model = trained.initial[number * width : (number + 1) * width]
        heard: dict[int, set[int]] = {rank: set() for rank in range(workers)}
        most = 0
        for entry in log:
            if isinstance(entry, Push):
                heard[entry.rank].add(entry.step)
                model = model - 0.1 / workers * entry.x
                continue
            rank, clock, shown = entry
            slowest = min(len(steps) for steps in heard.values())
            assert clock - slowest <= staleness
            most = max(most, clock - slowest)
            for steps in heard.values():  # of all: guaranteed
                assert steps >= set(range(clock - staleness))
            assert heard[rank] == set(range(clock))  # its own
            torch.testing.assert_close(shown, model, rtol=1e-12, atol=1e-12)  # and all others
        assert most == staleness
        assert max(trained.servers[number].noted["ahead"]) == staleness


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1), SGD(0.1, momentum=0.9, nesterov=True), Adam(0.1)], ids=repr
)
def test_with_no_staleness_it_is_bsp(train, optimizer, servers) -> None:
    for workers in (1, 2, 5):
        settings = {"workers": workers, "optimizer": optimizer, "compute": "exponential(0.01)"}
        bsp = train("bsp", "allreduce", **settings)
        ssp = train("ssp(0)", f"parameter_server({servers})", **settings)
        for own, expected in zip(ssp.params, bsp.params):
            assert torch.equal(own, expected)


def test_a_step_that_is_not_complete_is_shown_as_a_plain_step(train) -> None:
    # Worker 0 takes three times as long as worker 1, which is two ahead when it waits.
    trained = train(
        "ssp(2)",
        "parameter_server",
        workers=2,
        steps=3,
        momentum=0.5,
        compute="per_node((fixed(0.035), fixed(0.01)))",
    )
    x, g = trained.initial, trained.gradient
    one = x - 0.05 * g(1, x)
    two = one - 0.05 * g(1, one)
    torch.testing.assert_close(trained.after[1, 0].params, one)
    torch.testing.assert_close(trained.after[1, 1].params, two)
    # It has pushed three steps and waits for the first of worker 0, which completes a clock.
    base = x - 0.1 * (g(0, x) + g(1, x)) / 2
    shown = base - 0.05 * (g(1, one) + g(1, two))
    torch.testing.assert_close(trained.after[1, 2].params, shown)
    torch.testing.assert_close(trained.after[0, 0].params, shown)
    # In the end all clocks are complete, with momentum.
    y = x - 0.1 * (velocity := (g(0, x) + g(1, x)) / 2)
    y = y - 0.1 * (velocity := 0.5 * velocity + (g(0, shown) + g(1, one)) / 2)
    third = trained.after[0, 1].params
    y = y - 0.1 * (0.5 * velocity + (g(0, third) + g(1, two)) / 2)
    torch.testing.assert_close(trained.servers[0].params, y)
    torch.testing.assert_close(trained.params[0], y)


def test_every_push_has_the_learning_rate_of_its_step(train) -> None:
    # Worker 1 pushes two steps before the first of worker 0, which has twice their rate.
    schedule, clip = Step((1,), 0.5), 0.5
    trained = train(
        "ssp(1)",
        "parameter_server",
        workers=2,
        steps=2,
        schedule=schedule,
        clip_norm=clip,
        compute="per_node((fixed(0.035), fixed(0.01)))",
    )

    def g(rank: int, x: Tensor) -> Tensor:
        gradient = trained.gradient(rank, x)
        assert gradient.norm() > clip
        return gradient * clip / gradient.norm()

    x = trained.initial
    one = x - 0.05 * g(1, x)
    torch.testing.assert_close(trained.after[1, 0].params, one)
    complete = x - 0.1 * (g(0, x) + g(1, x)) / 2
    shown = complete - 0.025 * g(1, one)
    torch.testing.assert_close(trained.after[0, 0].params, shown)
    last = complete - 0.05 * (g(0, shown) + g(1, one)) / 2
    torch.testing.assert_close(trained.servers[0].params, last)


def test_a_large_staleness_never_waits(train) -> None:
    settings = {"workers": 4, "steps": 12, "compute": "exponential(0.01)"}
    ssp = train("ssp(12)", "parameter_server", **settings)
    asp = train("asp", "parameter_server", **settings)
    assert ssp.time_s == asp.time_s
    strict = train("ssp(0)", "parameter_server", **settings)
    assert strict.time_s > 1.2 * ssp.time_s


@pytest.mark.few
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("staleness", [0, 2])
def test_goes_on_without_a_lost_worker_and_with_one_that_comes_back(
    train, staleness, servers
) -> None:
    trained = train(
        f"ssp({staleness})",
        f"parameter_server({servers})",
        workers=4,
        steps=80,
        compute="exponential(0.01)",
        faults=["crash(1, at=0.1)", "crash(2, at=0.2, rejoin=0.4)", "arrive(0, at=0.05)"],
        heartbeat_s=0.05,
    )
    assert [replica is None for replica in trained.replicas] == [False, True, False, False]
    for rank in (0, 2, 3):
        assert (rank, 79) in trained.after
    a, b = trained.curvatures[[0, 2, 3]], trained.minima[[0, 2, 3]]
    optimum = a @ b / a.sum()  # of those that are left
    for server, shard in zip(trained.servers, trained.plan.shards()):
        assert server.memory["pushes"] == {}  # all clocks are complete
        expected = optimum[shard.start : shard.stop]  # but for who happens to be ahead
        atol = 0.1 if staleness else 1e-3
        torch.testing.assert_close(server.params, expected, rtol=0.0, atol=atol)


def test_what_a_lost_worker_pushed_still_counts(train) -> None:
    # Worker 1 is one step ahead when it dies; its second push is averaged with that of worker 0.
    trained = train(
        "ssp(5)",
        "parameter_server",
        workers=2,
        steps=3,
        compute="per_node((fixed(0.1), fixed(0.01)))",
        faults=["crash(1, at=0.025)"],
        heartbeat_s=0.02,
    )
    x, g = trained.initial, trained.gradient
    one = x - 0.05 * g(1, x)
    y = x - 0.1 * (g(0, x) + g(1, x)) / 2
    shown = y - 0.1 * g(1, one)  # the only member is now one of one
    torch.testing.assert_close(trained.after[0, 0].params, shown)
    y = y - 0.1 * (g(0, shown) + g(1, one)) / 2
    torch.testing.assert_close(trained.after[0, 1].params, y)
    torch.testing.assert_close(trained.after[0, 2].params, y - 0.1 * g(0, y))


def test_errors(train) -> None:
    with pytest.raises(ValueError, match="staleness must be at least 0, got -1"):
        SSP(-1)
    with pytest.raises(
        ValueError, match=r"ssp\(2\) needs.*push_pull; allreduce offers mean.*ahead"
    ):
        train("ssp(2)", "allreduce")
    with pytest.raises(ValueError, match="cannot change from step to step"):
        train("ssp(ramp(1, 4, steps=10))", "parameter_server")
    with pytest.raises(ValueError, match="each worker pushes on its own"):
        train("ssp(2)", "parameter_server", "powersgd(1)")


def test_the_slowest_is_answered_before_those_that_wait_for_it(train) -> None:
    settings = {
        "workers": 4,
        "steps": 12,
        "compute": "fixed(0.005)",
        "stragglers": "always((0,), slowdown=2.0)",
        "layers": (5000,),
        "bandwidth": "1Gbit",  # an answer takes 0.3 ms
    }
    ssp = Recorded(2)
    held = train(ssp, "parameter_server", **settings)
    (log,) = ssp.logs.values()
    answers: list[list[int]] = []  # the clocks, after each push
    for entry in log:
        if isinstance(entry, Push):
            answers.append([])
        elif isinstance(entry, tuple):
            answers[-1].append(entry[1])
    assert max(map(len, answers)) == 4
    assert all(clocks == sorted(clocks) for clocks in answers)
    free = train("asp", "parameter_server", **settings)
    assert held.engine.clocks[0] < 1.02 * free.engine.clocks[0]
