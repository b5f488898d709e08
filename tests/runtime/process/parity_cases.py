"""What the ranks of the parity test run: many cases, one after the other, in one process group."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import quadratics
from gradwire.architecture import ARCHITECTURE
from gradwire.architecture.gossip import _posts
from gradwire.core.node import Membership
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.frames import Headers
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.training import program, wire
from gradwire.training.flat import FlatLayout
from gradwire.training.server import TrainingServer
from quadratics import Quadratics, Trained

HEADERS = Headers(
    Membership,
    wire.PushHeader,
    wire.PullHeader,
    wire.AnswerHeader,
    _posts.Post,
    _posts.Back,
    _posts.Hello,
    _posts.Stranger,
    _posts.Welcome,
    _posts.Request,
)
STEPS = 10

_COLLECTIVES = (
    "allreduce",
    "ring",
    "binary_tree",
    "recursive_doubling",
    "double_binary_tree",
    "hierarchical(2)",
    "torus2d",
)
_COMPRESSIONS = (
    "identity",
    "fp16",
    "ef(topk(0.1))",
    "sign",
    "ef(signvote)",
    "ef(qsgd(4))",
    "powersgd(1)",
)
_SYNCHRONIZATIONS = (
    "localsgd(3)",
    'localsgd(3, momentum="average")',
    "postlocalsgd(4, period=2)",
    "crpsgd(1.5)",
    "lag(0.1)",
    "diloco(3)",
    "diloco(4, outer_lr=0.4, delay=2, mixing=0.5)",
    "fedavg(0.5)",
)
_GOSSIPS = (
    ("bsp", "gossip(ring)", "identity"),
    ("bsp", "gossip(ring, choco(0.3))", "topk(0.3)"),
    ("bsp", "gossip(exponential, sgp)", "identity"),
    ("localsgd(3)", "gossip(ring)", "identity"),
)


# One rank is the server, one the scheduler.
_SERVED = (
    ("bsp", 'parameter_server(servers=1, optimizer="server")', "identity"),
    ("bsp", 'parameter_server(servers=1, optimizer="server")', "ef(topk(0.1))"),
    ("bsp", 'parameter_server(servers=1, optimizer="server")', "sign"),
)


def num_workers(case: tuple[str, ...], size: int) -> int:
    return size - ARCHITECTURE.parse(case[1]).num_others


def cases(size: int) -> list[tuple[str, str, str]]:
    collectives = [
        name for name in _COLLECTIVES if size % 2 == 0 or not name.startswith("hierarchical")
    ]
    return [
        *[("bsp", name, squeezed) for name in collectives for squeezed in _COMPRESSIONS],
        *[(rule, "allreduce", "identity") for rule in _SYNCHRONIZATIONS],
        *_GOSSIPS,
        *[case for case in _SERVED if num_workers(case, size) >= 1],
    ]


_EXPECTED: dict[tuple[str, ...], Trained] = {}


class Matrices(Quadratics):
    """The first tensor is a matrix, for compression that needs one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        first, *others = self.layout.tensors
        self.layout = FlatLayout((first._replace(shape=(6, 4)), *others))


def prepare(size: int) -> None:
    """What the simulator says."""
    settings: dict[str, Any] = {"steps": STEPS, "momentum": 0.9, "lr": 0.05, "layers": (24, 9, 1)}
    with patch.object(quadratics, "Quadratics", Matrices):
        for case in cases(size):
            workers = num_workers(case, size)
            _EXPECTED[case] = quadratics._train(*case, workers=workers, **settings)


def run(rank: int, folder: Path) -> dict[str, Any]:
    """For each case what differs from the simulator; an empty text if nothing does."""
    size = torch.distributed.get_world_size()
    transport = GlooTransport(headers=HEADERS)
    verdicts = {}
    for job, case in enumerate(cases(size)):
        try:
            verdicts[" ".join(case)] = _differs(transport, job, case, rank, size)
        except Exception as error:
            raise RuntimeError(f"in {case}") from error
    transport.close()
    return verdicts


def _differs(transport: GlooTransport, job: int, case: tuple[str, ...], rank: int, n: int) -> str:
    expected = _EXPECTED[case]
    plan, ledger = expected.plan, expected.engine.ledger
    num_workers, num_servers = plan.num_workers, len(expected.servers)
    engine = ProcessEngine(
        transport, num_workers, evaluate=plan.task.gradients, timeout_s=20, job=job
    )
    same = {}
    if rank < num_workers:
        replica, there = plan.initial_replicas()[rank], expected.replicas[rank]
        result = engine.run(lambda node: program.train(plan, node, replica, 0, STEPS))
        assert result is not None
        same["parameters"] = torch.equal(result.params, there.params)
        same["optimizer"] = _same(result.optimizer, there.optimizer)
        same["memory"] = _same(result.memory, there.memory)
        same["moved"] = not torch.equal(result.params, expected.initial)
    elif rank < num_workers + num_servers:
        server = TrainingServer(plan, rank - num_workers)
        engine.run(server.run)
        same["shard"] = torch.equal(server.params, expected.servers[rank - num_workers].params)
    else:
        engine.run(lambda node: plan.architecture.daemon(node, {}))
    same["bytes"] = engine.ledger.link_bytes[rank] == ledger.link_bytes[rank]
    same["messages"] = engine.ledger.link_messages[rank] == ledger.link_messages[rank]
    return ", ".join(name for name, is_so in same.items() if not is_so)


def _same(mine: Any, theirs: Any) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
