"""What the ranks of the replay test run, and the same again from the orders they recorded.

Gradients take random times, so that who is first differs from run to run. Of every result there is
a digest for each of its fields: equal digests, equal bits.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from gradwire.architecture import ARCHITECTURE
from gradwire.core.node import Node
from gradwire.core.protocols import Replica
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.replay import digest_of
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.replay.engine import ReplayEngine
from gradwire.runtime.replay.order import Recorder, load
from gradwire.testing import quadratics
from gradwire.training.plan import Plan
from gradwire.training.program import train
from gradwire.training.server import TrainingServer

SIZE, STEPS = 5, 12
Case = tuple[str, str, str]
Digests = dict[str, str]

_ONE, _TWO = "parameter_server(servers=1)", "parameter_server(servers=2)"
_BOTH_WAYS = 'parameter_server(servers=1, answers="compressed")'
_ADPSGD = "gossip(ring, adpsgd)"
_MIXES = 'parameter_server(servers=1, optimizer="server")'

ASP: Case = ("asp", _ONE, "identity")
CASES: tuple[Case, ...] = (
    ASP,
    ("asp(scale_by_staleness=True)", _TWO, "identity"),
    ("asp", _TWO, "qsgd(4)"),
    ("asp", _BOTH_WAYS, "ef(topk(0.2))"),
    ("ssp(2)", _ONE, "identity"),
    ("ssp(1)", _BOTH_WAYS, "ef(sign)"),
    ("r2sp", _ONE, "identity"),
    ("bsp(backup=1)", _ONE, "identity"),
    ("bsp(backup=1)", _ONE, "ef(topk(0.2))"),
    ("bsp(timeout=0.002)", _ONE, "identity"),
    ("fedavg(0.5)", _ONE, "identity"),
    ("fedavg(0.5)", _TWO, "ef(topk(0.2))"),
    ("bsp", _MIXES, "ef(topk(0.2))"),
    ("bsp", _TWO, "ef(topk(0.2))"),
    ("asp", _ADPSGD, "identity"),
    ("localsgd(3)", "gossip(ring)", "identity"),
    ("localsgd(2)", "gossip(ring, choco(0.3))", "topk(0.3)"),
    ("bsp", "gossip(exponential, sgp)", "identity"),
    ("diloco(4, outer_lr=0.4, delay=2, mixing=0.5)", "allreduce", "identity"),
    ("lag(0.1)", "allreduce", "identity"),
    ("laq(0.08)", "allreduce", "qsgd(4)"),
)


def jobs() -> list[tuple[Case, int]]:
    """Cases with the seeds of their delays; one of them is run twice."""
    return [*[(case, 0) for case in CASES], (ASP, 1)]


@cache
def plan_of(case: Case) -> Plan:
    workers = SIZE - ARCHITECTURE.parse(case[1]).num_others
    settings: dict[str, Any] = {"momentum": 0.9, "lr": 0.02, "layers": (24, 9, 1), "noise": 0.1}
    return quadratics.train(*case, workers=workers, steps=STEPS, **settings).plan


def prepare(size: int) -> None:
    assert size == SIZE
    for case in CASES:
        plan_of(case)


def order_path(folder: Path, job: int, rank: int) -> Path:
    return folder / f"order-{job}-{rank}.jsonl"


class Nodes:
    """The programs of all nodes of a case; each process runs one of them, a replay all."""

    def __init__(self, case: Case) -> None:
        self.plan = plan = plan_of(case)
        self.replicas = plan.initial_replicas()
        holds_model = plan.ability == "push_pull"
        num_servers = plan.architecture.num_servers if holds_model else 0
        self.servers = [TrainingServer(plan, number) for number in range(num_servers)]
        self.kept: list[dict[Any, Any]] = [{} for _ in range(plan.architecture.num_others)]

    def program(self, rank: int) -> Callable[[Node], Any]:
        plan, number = self.plan, rank - self.plan.num_workers
        if number < 0:
            return lambda node: train(plan, node, self.replicas[rank], 0, STEPS, self)
        if number < len(self.servers):
            return self.servers[number].run
        return lambda node: plan.architecture.daemon(node, self.kept[number])

    def worker_started(self, worker: Any) -> None:
        pass

    def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
        self.replicas[rank] = replica

    def digests(self, rank: int) -> Digests:
        number = rank - self.plan.num_workers
        if number < 0:
            state = {one.name: getattr(self.replicas[rank], one.name) for one in fields(Replica)}
        elif number < len(self.servers):
            state = self.servers[number].snapshot()
        else:
            state = {"kept": self.kept[number]}
        return {name: digest_of(value) for name, value in state.items()}


def run(rank: int, folder: Path) -> list[dict[str, Any]]:
    """For each job the digests and what was sent."""
    transport = GlooTransport(headers=HEADERS)
    results = [
        _run(transport, job, case, folder, _delays(f"{seed} {rank}"))
        for job, (case, seed) in enumerate(jobs())
    ]
    transport.close()
    return results


def killed(rank: int, folder: Path) -> dict[str, Any]:
    """Worker 1 is killed while it computes."""
    transport = GlooTransport(headers=HEADERS)
    delays = _delays(str(rank))

    def delayed() -> float:
        if rank == 1 and next(steps) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return delays() + 0.01

    steps = count()
    return _run(transport, 0, ASP, folder, delayed)


def _delays(seed: str) -> Callable[[], float]:
    """How long gradients take."""
    draws = random.Random(seed)
    slowness = draws.choice((0.0, 0.002))
    return lambda: slowness + draws.random() * 0.004


def _run(
    transport: GlooTransport, job: int, case: Case, folder: Path, delays: Callable[[], float]
) -> dict[str, Any]:
    rank, nodes = transport.rank, Nodes(case)

    def evaluate(requests: list[Any]) -> Sequence[Any]:
        time.sleep(delays())
        return nodes.plan.task.gradients(requests)

    workers = nodes.plan.num_workers
    log = Recorder(order_path(folder, job, rank), rank, SIZE, workers, " ".join(case))
    engine = ProcessEngine(transport, workers, evaluate=evaluate, timeout_s=20, job=job, log=log)
    try:
        engine.run(nodes.program(rank))
    except Exception as error:
        raise RuntimeError(f"in {case}") from error
    log.close()
    sent = [engine.ledger.link_bytes[rank], engine.ledger.link_messages[rank]]
    return {"digests": nodes.digests(rank), "sent": sent}


def replayed(
    case: Case, folder: Path, job: int, killed: frozenset[int] = frozenset()
) -> list[dict[str, Any]]:
    """Of every rank what `run` returns of a job, from the orders alone."""
    nodes = Nodes(case)
    orders = [
        load(order_path(folder, job, rank), was_killed=rank in killed) for rank in range(SIZE)
    ]
    engine = ReplayEngine(orders, evaluate=nodes.plan.task.gradients)
    programs = [nodes.program(rank) for rank in range(SIZE)]
    workers = nodes.plan.num_workers
    engine.run(programs[:workers], programs[workers:])
    ledger = engine.ledger
    return [
        {
            "digests": nodes.digests(rank),
            "sent": [ledger.link_bytes[rank], ledger.link_messages[rank]],
        }
        for rank in range(SIZE)
    ]
