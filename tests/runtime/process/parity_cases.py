"""What the ranks of the parity test run: many cases, one after the other, in one process group.

A case is a synchronization, an architecture and a compression. `everything` has the synchronous
ones of the library: every compression on all-reduce and on servers, every architecture with every
road that compression takes, every rule on every kind of architecture. What the library refuses is
left out by its own word, and so is what comes out otherwise where the simulator's workers take
other times.

Where there are servers messages go by ZeroMQ, else by gloo. Workers are the first ranks, then
servers, then the scheduler; ranks that a case has no use for pass it by.
"""

import os
import time
import warnings
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from gradwire.architecture import ARCHITECTURE
from gradwire.compression import COMPRESSION
from gradwire.core.errors import GradwireWarning, NonFiniteError, WireError
from gradwire.core.notation import notation_name
from gradwire.core.registry import Registry
from gradwire.experiment.processes.headers import HEADERS
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.gloo import GlooTransport
from gradwire.runtime.process.transport import Transport
from gradwire.runtime.zeromq.transport import ZmqTransport
from gradwire.synchronization import SYNCHRONIZATION
from gradwire.testing import quadratics
from gradwire.testing.quadratics import Quadratics, Trained
from gradwire.training import program
from gradwire.training.flat import FlatLayout
from gradwire.training.server import TrainingServer

Case = tuple[str, str, str]

STEPS = 12  # more than the periods of all rules
MOST_OTHERS = 3  # two servers and the scheduler
ASYNCHRONOUS = "asynchronous"
# Of the cases: "all"; "part", another one for each number of workers; unset: a few, likewise.
SHARE = "GRADWIRE_PARITY_SHARE"
_PARTS = {2: (0, 1, 2), 3: (3, 4), 4: (5,)}  # sixths: more workers take longer

_SERVERS = (
    'parameter_server(2, optimizer="worker")',
    'parameter_server(2, optimizer="worker", answers="compressed")',
    'parameter_server(2, optimizer="server")',
    'parameter_server(optimizer="server", answers="compressed")',
)
# One and more of each road: added, merged, gathered, and reducers with several rounds.
_ROADS = (
    "identity",
    "fp16",
    "randomk(0.3)",
    "ef(topk(0.1))",
    "sign",
    "ef(signvote)",
    "ef(gtopk(0.1))",
    "terngrad(share=True)",
    "powersgd(1)",
    "countsketch(3, columns=20, density=0.1)",
    "neolithic(sign, rounds=3)",
)
# With few steps; where an example would not come to its first exchange.
_SHORT = (
    "localsgd(3)",
    'localsgd(3, momentum="average")',
    "postlocalsgd(4, period=2)",
    "diloco(3)",
    "diloco(4, outer_lr=0.4, delay=2, mixing=0.5)",
    'localsgd(3, unsent="kept")',
    "diloco(6, fragments=2)",
)


def _examples(registry: Registry[Any]) -> list[tuple[str, ...]]:
    return [cls.examples or (notation_name(cls),) for cls in registry]


def everything() -> list[list[Case]]:
    """All cases, refused ones among them."""
    compressions = list(chain(*_examples(COMPRESSION)))
    rules = [*chain(*_examples(SYNCHRONIZATION)), *_SHORT]
    every = list(dict.fromkeys([*chain(*_examples(ARCHITECTURE)), *_SERVERS]))
    kinds = ["allreduce", "ring", *[name for name in every if "gossip" in name or "server" in name]]
    found = dict.fromkeys(product(["bsp"], ["allreduce", *_SERVERS], compressions))
    found |= dict.fromkeys(product(["bsp"], every, _ROADS))
    found |= dict.fromkeys(product(rules, kinds, ["identity", "topk(0.3)"]))
    return [[case] for case in found]


def some() -> list[list[Case]]:
    """Every compression, every architecture, every rule on every kind of architecture: once.

    Of each list the first is taken that the library does not refuse.
    """
    every = list(dict.fromkeys([*chain(*_examples(ARCHITECTURE)), *_SERVERS]))
    parsed = {text: ARCHITECTURE.parse(text) for text in every}
    found = []
    for number, texts in enumerate(_examples(COMPRESSION)):
        names = _turned(["allreduce", *_SERVERS], number)
        found.append([("bsp", name, text) for text in _turned(texts, number) for name in names])
    for number, text in enumerate(every):
        found.append([("bsp", text, road) for road in _turned(_ROADS, number)])
    kinds = [
        [text for text in every if not parsed[text].num_others and "mean" in parsed[text].offers],
        [text for text in every if parsed[text].num_others and "mean" in parsed[text].offers],
        [text for text in every if parsed[text].offers == ("push_pull",)],
        [text for text in every if "mix" in parsed[text].offers],
    ]
    for number, rule in enumerate([*chain(*_examples(SYNCHRONIZATION)), *_SHORT]):
        squeezed = ["identity", "topk(0.3)"] if number % 2 else ["topk(0.3)", "identity"]
        found += [
            [(rule, *two) for two in product(_turned(names, number), squeezed)] for names in kinds
        ]
    return found


def _turned(items: Sequence[str], number: int) -> list[str]:
    first = number % len(items)
    return [*items[first:], *items[:first]]


def slots(num_workers: int) -> list[list[Case]]:
    """Those of this number of workers."""
    share = os.environ.get(SHARE)
    if share == "all":
        return everything()
    if share == "part":
        return [case for i, case in enumerate(everything()) if i % 6 in _PARTS[num_workers]]
    return some()[num_workers % 3 :: 3]


class Matrices(Quadratics):
    """The first tensor is a matrix, for compression that needs one."""

    latest_step = 0  # of a gradient

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        first, *others = self.layout.tensors
        self.layout = FlatLayout((first._replace(shape=(6, 4)), *others))
        Matrices.latest_step = 0

    def gradients(self, requests: Any) -> Any:
        steps = [request.key.step for request in requests]
        Matrices.latest_step = max(Matrices.latest_step, *steps)
        return super().gradients(requests)


def simulated(case: Case, num_workers: int, **settings: Any) -> Trained | str:
    """What the simulator says, or why the library refuses it before the second step."""
    with patch.object(quadratics, "Quadratics", Matrices), warnings.catch_warnings():
        warnings.simplefilter("ignore", GradwireWarning)  # of compression whose errors may grow
        try:
            return quadratics.train(
                *case,
                workers=num_workers,
                steps=STEPS,
                momentum=0.9,
                lr=0.05,
                layers=(24, 9, 1),
                **settings,
            )
        except (WireError, NonFiniteError):
            raise
        except ValueError as error:
            if Matrices.latest_step > 0:
                raise
            return str(error)


_EXPECTED: dict[Case, Trained | str] = {}


def prepare(size: int) -> None:
    num_workers = size - MOST_OTHERS
    for slot in slots(num_workers):
        for case in slot:
            if case not in _EXPECTED:
                _EXPECTED[case] = synchronous(case, num_workers)
            if _EXPECTED[case] == ASYNCHRONOUS or not isinstance(_EXPECTED[case], str):
                break


def synchronous(case: Case, num_workers: int) -> Trained | str:
    """What the simulator says, unless it depends on who is fast."""
    expected = simulated(case, num_workers)
    if isinstance(expected, str) or expected.plan.ability in ("mean", "mix") or case[0] == "bsp":
        return expected
    for compute, latency in (("lognormal(0.5, sigma=1.0)", "1ms"), ("lognormal(0.01)", "100ms")):
        other = simulated(case, num_workers, compute=compute, latency=latency)
        assert isinstance(other, Trained)
        if not all(map(torch.equal, other.params, expected.params)):
            return ASYNCHRONOUS
    return expected


def run(rank: int, folder: Path) -> dict[str, Any]:
    """For each case what differs from the simulator; an empty text if nothing does."""
    gloo = GlooTransport(headers=HEADERS)
    zeromq: dict[int, ZmqTransport] = {}  # by the number of servers
    verdicts: dict[str, str] = {}
    refused: dict[str, str] = {}
    for job, (case, expected) in enumerate(_EXPECTED.items()):
        if isinstance(expected, str):
            refused[" ".join(case)] = expected
            continue
        num_workers, architecture = expected.plan.num_workers, expected.plan.architecture
        if rank >= num_workers + architecture.num_others:
            continue
        num_servers = architecture.num_servers
        if num_servers and num_servers not in zeromq:
            zeromq[num_servers] = connect(rank, num_workers, num_servers, folder)
        transport = zeromq[num_servers] if num_servers else gloo
        try:
            verdicts[" ".join(case)] = _differs(transport, job, expected, rank)
        except Exception as error:
            raise RuntimeError(f"in {case}") from error
    for node in (*zeromq.values(), gloo):
        node.close()
    return {"verdicts": verdicts, "refused": refused}


def connect(rank: int, num_workers: int, num_servers: int, folder: Path) -> ZmqTransport:
    found = folder / f"scheduler{num_servers}"
    settings: dict[str, Any] = {
        "num_workers": num_workers,
        "num_servers": num_servers,
        "headers": HEADERS,
        "fingerprint": HEADERS.digest,
    }

    def tell(address: str) -> None:
        (folder / "address").write_text(address)
        (folder / "address").rename(found)

    if rank == num_workers + num_servers:
        return ZmqTransport("scheduler", scheduler="tcp://127.0.0.1:0", on_bound=tell, **settings)
    until = time.monotonic() + 30
    while not found.exists() and time.monotonic() < until:
        time.sleep(0.01)
    role: Literal["worker", "server"] = "worker" if rank < num_workers else "server"
    return ZmqTransport(role, scheduler=found.read_text(), rank=rank, **settings)


def _differs(transport: Transport, job: int, expected: Trained, rank: int) -> str:
    plan, ledger = expected.plan, expected.engine.ledger
    num_workers, num_servers = plan.num_workers, len(expected.servers)
    # Workers do cases without the others, which wait for the next one of theirs meanwhile.
    timeout_s = 20 if rank < num_workers else 600
    engine = ProcessEngine(
        transport, num_workers, evaluate=plan.task.gradients, timeout_s=timeout_s, job=job
    )
    same = {}
    if rank < num_workers:
        replica, there = plan.initial_replicas()[rank], expected.replicas[rank]
        result = engine.run(lambda node: program.train(plan, node, replica, 0, STEPS))
        assert result is not None
        same["parameters"] = torch.equal(result.params, there.params)
        same["optimizer"] = _same(result.optimizer, there.optimizer)
        same["memory"] = _same(result.memory, there.memory)
    elif rank < num_workers + num_servers:
        server = TrainingServer(plan, rank - num_workers)
        engine.run(server.run)
        same["shard"] = torch.equal(server.params, expected.servers[rank - num_workers].params)
    else:
        engine.run(lambda node: plan.architecture.daemon(node, {}))
    for name in ("link_bytes", "link_messages"):
        mine, theirs = getattr(engine.ledger, name)[rank], getattr(ledger, name)[rank]
        same[name] = list(mine) == [*theirs, *[0] * (len(mine) - len(theirs))]
    return ", ".join(name for name, is_so in same.items() if not is_so)


def _same(mine: Any, theirs: Any) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
