"""A server that is closed while it waits, saved, loaded and run again does the same as before.

In the simulator, with real workers: each time a server waits for what comes next (or every k-th
time) it is replaced by a new one that knows only what `torch.load(weights_only=True)` gives back.
Time does not pass in between, so everything must be the same to the last bit.
"""

import io
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from gradwire.architecture.parameter_server import parameter_server
from gradwire.core.limits import Limits
from gradwire.core.node import Node, RecvAny
from gradwire.core.wire import REQUEST
from gradwire.experiment.report.figures import noted
from gradwire.testing import quadratics
from gradwire.testing.quadratics import Trained
from gradwire.training.plan import Plan
from gradwire.training.server import TrainingServer
from sampling import slow

FAULTS = ("crash(1, at=0.05)", "crash(2, at=0.1, rejoin=0.2)", "arrive(0, at=0.03)")
HOLDING = 'parameter_server(2, optimizer="server")'
SQUEEZING = 'parameter_server(2, optimizer="server", answers="compressed")'
SQUEEZED_MEANS = 'parameter_server(2, answers="compressed")'
Restart = Callable[[], Coroutine[Any, Any, None]]


def saved_and_loaded(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


async def restarting(start: Restart, every: int) -> None:
    """Runs a program; `start` makes another one in its place every so many times it waits."""
    program, num_waits = start(), 0
    value: Any = None
    failure: Exception | None = None
    while True:
        effect = program.send(value) if failure is None else program.throw(failure)
        value = failure = None
        if isinstance(effect, RecvAny) and effect.tag == REQUEST:
            num_waits += 1
            if num_waits % every == 0:
                program.close()
                program = start()
                effect = program.send(None)
                while not isinstance(effect, RecvAny):  # until it waits again
                    effect = program.send(await effect)
        try:
            value = await effect
        except Exception as error:
            failure = error


class Mortal:
    """A server that is replaced by its snapshot again and again."""

    every = 1
    is_replayed = True

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.number = plan, number
        self.current: TrainingServer | None = None
        self.num_restarts = -1
        self._next()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)

    def _next(self) -> None:
        before, self.current = self.current, TrainingServer(self.plan, self.number)
        if before is not None:
            state = saved_and_loaded(before.snapshot())
            self.current.restore(state, is_replayed=self.is_replayed)
        self.num_restarts += 1

    async def run(self, node: Node) -> None:
        def start() -> Coroutine[Any, Any, None]:
            if self._has_begun:
                self._next()
            self._has_begun = True
            assert self.current is not None
            return self.current.run(node)

        self._has_begun = False
        await restarting(start, self.every)


def same(one: Trained, other: Trained) -> None:
    assert one.time_s == other.time_s
    assert one.sent_bytes == other.sent_bytes
    assert one.engine.ledger.link_messages == other.engine.ledger.link_messages
    for mine, theirs in zip(one.replicas, other.replicas, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert torch.equal(mine.params, theirs.params)
    for server, twin in zip(one.servers, other.servers, strict=True):
        assert torch.equal(server.params, twin.params)
        assert server.notes == twin.notes


@pytest.mark.few(2)
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("faults", [(), FAULTS], ids=["", "faults"])
@pytest.mark.parametrize(
    ("synchronization", "architecture", "compression"),
    [
        ("bsp", HOLDING, "ef(topk(0.3))"),
        slow("bsp", SQUEEZING, "ef(sign)"),
        ("bsp(backup=1)", HOLDING, "identity"),
        slow("bsp(backup=2)", SQUEEZING, "topk(0.3)"),
        slow("ssp(2)", HOLDING, "ef(sign)"),
        ("ssp(2)", SQUEEZING, "topk(0.3)"),
        slow("asp", HOLDING, "sign"),
        ("asp(scale_by_staleness=True)", SQUEEZING, "ef(topk(0.3))"),
        ("r2sp", HOLDING, "ef(qsgd(4))"),
        slow("r2sp", SQUEEZING, "sign"),
        ("fedavg(0.5)", HOLDING, "topk(0.3)"),
        slow("fedavg(1.0)", SQUEEZING, "topk(0.3)"),
    ],
)
def test_a_server_goes_on_from_its_snapshot(
    monkeypatch, train, synchronization, architecture, compression, faults, every
) -> None:
    if faults and synchronization in ("bsp", "bsp(backup=1)"):
        faults = ("crash(1, at=0.05, rejoin=0.2)",) if "backup" in synchronization else ()
    settings = {
        "workers": 4,
        "steps": 16,
        "momentum": 0.9,
        "lr": 0.02,
        "layers": (12, 3, 25),
        "scheduling": 'sequential("layer")',
        "compute": "exponential(0.01)",
        "faults": faults,
        "heartbeat_s": 0.02,
    }
    if "fedavg" in synchronization:
        settings |= {"num_examples": (30, 10, 20, 20), "batch_size": 10}
    expected = train(synchronization, architecture, compression, **settings)
    monkeypatch.setattr(quadratics, "RecordingServer", Mortal)
    monkeypatch.setattr(Mortal, "every", every)
    trained = train(synchronization, architecture, compression, **settings)
    same(trained, expected)
    assert all(server.num_restarts > 12 // every for server in trained.servers)


@pytest.mark.few(2)
@pytest.mark.parametrize("every", [1])
@pytest.mark.parametrize("architecture", ["parameter_server(2)", SQUEEZED_MEANS])
@pytest.mark.parametrize(
    ("synchronization", "compression"),
    [
        ("bsp", "identity"),
        ("bsp", "ef(topk(0.3))"),
        ("bsp", "ef(signvote)"),
        ("localsgd(3)", "ef(qsgd(4))"),
        ("bsp", "powersgd(1)"),
    ],
)
def test_a_server_that_forms_means_goes_on_from_what_it_kept(
    monkeypatch, train, synchronization, architecture, compression, every
) -> None:
    settings = {
        "workers": 4,
        "steps": 9,
        "momentum": 0.9,
        "lr": 0.02,
        "layers": (12, 3, 25),
        "scheduling": 'sequential("layer")',
        "compute": "exponential(0.01)",
    }
    expected = train(synchronization, architecture, compression, **settings)
    real, num_restarts = parameter_server.serve_collectives, 0

    async def mortal(node: Node, num_servers: int, keep: dict[Any, Any], limits: Limits) -> None:
        def start() -> Coroutine[Any, Any, None]:
            nonlocal num_restarts, keep
            num_restarts += 1
            keep = saved_and_loaded(keep)
            return real(node, num_servers, keep, limits)

        await restarting(start, every)

    monkeypatch.setattr(parameter_server, "serve_collectives", mortal)
    trained = train(synchronization, architecture, compression, **settings)
    same(trained, expected)
    assert num_restarts > 20 // every


def test_a_timeout_begins_anew_if_pushes_wait(monkeypatch, train) -> None:
    settings = {
        "workers": 3,
        "steps": 12,
        "compute": "fixed(0.01)",
        "faults": ["crash(2, at=0.0)"],
        "heartbeat_s": 100.0,  # so that each step times out
    }
    expected = train("bsp(timeout=0.05)", HOLDING, "identity", **settings)
    monkeypatch.setattr(quadratics, "RecordingServer", Mortal)
    trained = train("bsp(timeout=0.05)", HOLDING, "identity", **settings)
    for server, twin in zip(trained.servers, expected.servers, strict=True):
        assert torch.equal(server.params, twin.params)
        assert server.notes == twin.notes
    assert all(server.num_restarts > 20 for server in trained.servers)


def test_without_news_a_restored_server_looks_who_is_there(monkeypatch, train) -> None:
    """As if the scheduler's messages had been lost with the server's process."""
    real = TrainingServer._change_membership
    monkeypatch.setattr(
        TrainingServer,
        "_change_membership",
        lambda server, news: real(server, news) if news.there else None,
    )
    monkeypatch.setattr(quadratics, "RecordingServer", Mortal)
    settings = {
        "workers": 3,
        "steps": 15,
        "compute": "fixed(0.01)",
        "faults": ["crash(1, at=0.05)"],
        "heartbeat_s": 0.01,
    }
    monkeypatch.setattr(Mortal, "is_replayed", False)
    trained = train("ssp(1)", HOLDING, "identity", **settings)
    assert all(server.members == {0, 2} for server in trained.servers)
    assert all(int(server.memory["num_complete"]) == 15 for server in trained.servers)


def test_what_was_noted_does_not_grow_in_a_state(train) -> None:
    trained = train("asp", HOLDING, steps=30, compute="exponential(0.01)")
    for server in trained.servers:
        values = server.noted["staleness"]
        assert len(values) == 4 * 30
        figures = sum(values), len(values), max(values)
        assert saved_and_loaded(server.snapshot())["notes"] == {"staleness": figures}
    values = [value for server in trained.servers for value in server.noted["staleness"]]
    assert max(values) > 0
    assert noted(trained.servers) == {
        "staleness": {"mean": sum(values) / len(values), "max": max(values)}
    }
