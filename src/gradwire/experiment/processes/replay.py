"""Runs on real processes, done again in one process from the order that they recorded.

With `record_order` every rank of a real run leaves `order-RANK.jsonl` with the records
(`runtime/replay/order.py`). From these and the configuration `replay` computes the same run again,
on the programs that the ranks ran, and compares: of every rank all that it had in the end, bit by
bit, and the bytes that it sent on every link. Of a rank that was killed neither is known; what it
did until then is done again, as far as it had written it down.
"""

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.core.protocols import Replica
from gradwire.experiment.processes.node.parts import (
    Part,
    Segment,
    ServerPart,
    WorkerPart,
    holders,
    part_of,
)
from gradwire.experiment.report.figures import counted, distance_of, noted, number
from gradwire.experiment.run.outcome import Model, Run, metrics_row, summary_of, use_threads
from gradwire.experiment.run.record import Record, Row, Say, warn
from gradwire.experiment.run.setup import Experiment, prepare
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.replay.engine import ReplayEngine
from gradwire.runtime.replay.order import EventOrder, OrderError, Recorder, RunOrder, load
from gradwire.runtime.storage.files import write_atomically
from gradwire.runtime.storage.text import LineSeal
from gradwire.training.worker import TrainingWorker

_NOT_RECORDED = "not recorded"  # in the place of an order: why


def order_path(folder: Path, rank: int) -> Path:
    return folder / f"order-{rank}.jsonl"


def recorder(
    folder: Path,
    experiment: Experiment,
    rank: int,
    step: int,
    *,
    is_inside: bool = False,
    say: Say = warn,
) -> Recorder | None:
    """Where a rank of a run writes its order, from this step on.

    `is_inside`: this is a server that continues from a state of its own. Messages that it received
    before are not replayed, so its order would be incomplete, and none is recorded; `say` reports
    that.
    """
    path, workers = order_path(folder, rank), experiment.plan.num_workers
    num_nodes = workers + experiment.plan.architecture.num_others
    about = experiment.config.to_toml()
    try:
        if is_inside:
            raise OrderError(
                f"server {rank - workers} was started again, and went on from what it had saved on "
                "its way: the order of what it received before is lost"
            )
        if step and _why_none(path):
            raise OrderError(_why_none(path))
        return Recorder(path, rank, num_nodes, workers, about, step)
    except OrderError as error:
        say(f"the order of this run is not complete and no longer recorded: {error}")
        line = json.dumps({_NOT_RECORDED: str(error)})
        write_atomically(path, LineSeal().seal(line).encode())
        return None


def _why_none(path: Path) -> str:
    """Why it is not an order that is in this file; "": it is one, or something else."""
    try:
        with path.open(encoding="utf-8") as file:
            line = LineSeal().open(file.readline().removesuffix("\n"))
        head = None if line is None else json.loads(line)
    except (OSError, ValueError):
        return ""
    return str(head.get(_NOT_RECORDED, "")) if isinstance(head, dict) else ""


@contextmanager
def recorded(engine: ProcessEngine, log: Recorder | None, first: int, last: int) -> Iterator[None]:
    """What the engine runs meanwhile is recorded, as the steps first .. last - 1."""
    if log is not None:
        log.steps = (first, last)
    engine.log = log
    try:
        yield
    finally:
        engine.log = None


def finish(log: Recorder | None, part: Part) -> None:
    """The rank came to the end of the run."""
    if log is not None:
        log.result(digest_of(part.snapshot()))
        log.close()


@dataclass(frozen=True)
class Replayed:
    """What came out of a replay, and what of it is not as the ranks had it."""

    run: Run
    differs: tuple[str, ...]
    compared: str  # what was

    @property
    def is_equal(self) -> bool:
        return not self.differs


def replay(folder: str | Path) -> Replayed:
    """Computes the recorded run in this folder again."""
    record = Record.open(Path(folder))
    began = time.perf_counter()
    summary, orders = _summary(record), _orders(record)
    with use_threads(summary.get("threads", 0)):
        experiment = prepare(record.config)
        return _replayed(experiment, orders, summary, began)


def _replayed(
    experiment: Experiment, orders: list[EventOrder], summary: Row, began: float
) -> Replayed:
    plan, lost = experiment.plan, _lost(summary)
    _check(experiment, orders)
    parts = [part_of(plan, rank) for rank in range(len(orders))]
    engine = ReplayEngine(orders, evaluate=plan.task.gradients)
    for first, last in engine.steps:
        segment = Segment(first, last, _NoObserver())
        programs = [part.program(segment) for part in parts]
        results = engine.run(programs[: plan.num_workers], programs[plan.num_workers :])
        for part, result in zip(parts, results):
            if result is not None:
                part.took(result)
    there = [rank for rank in range(len(parts)) if rank not in lost]
    differs = [
        f"rank {rank}" for rank in there if orders[rank].result != digest_of(parts[rank].snapshot())
    ]
    sent = engine.ledger.link_bytes, summary["bytes_by_link"]
    differs += [f"bytes that rank {rank} sent" for rank in there if sent[0][rank] != sent[1][rank]]
    workers = [part for rank in there if isinstance(part := parts[rank], WorkerPart)]
    replicas = [part.replica for part in workers]
    params, buffers = _model(experiment, parts, workers)
    row = metrics_row(
        experiment,
        engine.steps[-1][1] if engine.steps else 0,
        [_own(experiment, part) for part in workers] if plan.mixes else [(params, buffers)],
        [float(replica.loss) for replica in replicas if replica.loss is not None],
        time_s=engine.now,
        bytes_sent=engine.ledger.total_bytes,
        distance=number(distance_of([replica.params for replica in replicas])),
        dropped_steps=max(replica.num_dropped for replica in replicas),
    )
    servers = [part.server for part in parts if isinstance(part, ServerPart)]
    compared = _compared(lost)
    again = summary_of(
        experiment,
        row,
        engine.ledger,
        # Those of a worker that was lost only servers have counted, in the run.
        summary["gradients"] if lost else sum(replica.num_gradients for replica in replicas),
        noted={**noted(servers), **counted(experiment.plan, replicas)},
        wall_time_s=time.perf_counter() - began,
        replay_differs=differs,
        replay_compared=compared,
    )
    # Times are those of the ranks.
    run = Run(
        experiment.config, [row], {**summary, **again}, params, buffers, replicas, engine.ledger
    )
    return Replayed(run, tuple(differs), compared)


def _compared(lost: frozenset[int]) -> str:
    """What was, in words."""
    if not lost:
        return "every rank, bit by bit, and the bytes on every link"
    ranks = ", ".join(map(str, sorted(lost)))
    return f"every rank but the lost ({ranks}), bit by bit, and the bytes that they sent"


def _summary(record: Record) -> Row:
    if not record.has_summary:
        raise ValueError(f"{record.folder}: the run has not come to its end, or not been recorded")
    summary = record.summary
    if "stopped" in summary:
        raise ValueError(
            f"{record.folder}: the run stopped before its end, so it cannot be replayed: "
            f"{summary['stopped']}"
        )
    if summary.get("is_rest"):
        raise ValueError(
            f"{record.folder}: the run went on from what the servers of another job had left, and "
            "only runs whose workers begin with the first step can be replayed"
        )
    back = [row["rank"] for row in summary["lost"] if "back_s" in row]
    if back:
        raise ValueError(
            f"{record.folder}: worker {back[0]} was lost and came back, and only runs in which "
            "nobody does can be replayed"
        )
    return summary


def _lost(summary: Row) -> frozenset[int]:
    """The ranks that were killed."""
    return frozenset(row["rank"] for row in summary["lost"])


def _orders(record: Record) -> list[EventOrder]:
    first = order_path(record.folder, 0)
    if not first.exists():
        raise ValueError(
            f"{record.folder} holds no recorded order: there is no {first.name} in it. Run it with "
            "--engine process --record-order."
        )
    lost = _lost(_summary(record))
    num_nodes = _loaded(first, was_killed=True).num_nodes
    orders = [
        _loaded(order_path(record.folder, rank), was_killed=rank in lost)
        for rank in range(num_nodes)
    ]
    runs = next(order.runs for order in orders if order.rank not in lost)
    return [_padded(order, runs) if order.rank in lost else order for order in orders]


def _loaded(path: Path, *, was_killed: bool) -> EventOrder:
    why = _why_none(path)
    if why:
        raise ValueError(f"{path}: this run cannot be replayed. Its order is not complete: {why}")
    return load(path, was_killed=was_killed)


def _padded(order: EventOrder, runs: Sequence[RunOrder]) -> EventOrder:
    """Of a rank that was killed before it came to the last runs: there it does nothing."""
    missing = (RunOrder((), None, run.steps) for run in runs[len(order.runs) :])
    return replace(order, runs=(*order.runs, *missing))


def _check(experiment: Experiment, orders: list[EventOrder]) -> None:
    expected = experiment.plan.num_workers + experiment.plan.architecture.num_others
    if len(orders) != expected:
        raise OrderError(f"orders of {len(orders)} nodes, but this run has {expected}")
    about = experiment.config.to_toml()
    for order in orders:
        if order.about != about:
            lines = zip(order.about.splitlines(), about.splitlines())
            pairs = [f"{there} there, {here} here" for there, here in lines if there != here]
            raise OrderError(
                f"{order.source} is the order of another configuration: "
                + (pairs[0] if pairs else "it has other settings")
            )


def _own(experiment: Experiment, part: WorkerPart) -> Model:
    """The model of one worker."""
    params, *buffers = part.model()
    return params, dict(zip(experiment.plan.task.initial_buffers(), buffers))


def _model(experiment: Experiment, parts: list[Part], workers: list[WorkerPart]) -> Model:
    """What the servers hold, or one of the workers that are there."""
    plan = experiment.plan
    ranks = holders(plan, [part.report(digests=False) for part in workers])
    held = [parts[rank].model() for rank in ranks]
    buffers = held[0][1:]
    if ranks[0] >= plan.num_workers:
        buffers = workers[0].model()[1:]
    params = torch.cat([shard[0] for shard in held]) if len(held) > 1 else held[0][0]
    return params, dict(zip(plan.task.initial_buffers(), buffers))


class _NoObserver:
    """An observer of workers that does nothing."""

    def begins(self, worker: TrainingWorker) -> None:
        pass

    def stepped(self, rank: int, step: int, replica: Replica, now: float) -> None:
        pass


def digest_of(state: Any) -> str:
    """A digest that is equal for states that are equal bit by bit.

    A state is made of tensors, dataclasses, dicts, sequences, sets and plain values.
    """
    hashed = blake2b(digest_size=16)
    for piece in _pieces(state):
        hashed.update(piece)
    return hashed.hexdigest()


def _pieces(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)};".encode()
        flat = value.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        yield f"{type(value).__name__} {value!r};".encode()
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)};".encode()
        for key in sorted(value, key=repr):
            yield from _pieces(key)
            yield from _pieces(value[key])
    elif isinstance(value, frozenset | set):
        yield from _pieces(sorted(value, key=repr))
    elif isinstance(value, tuple | list | deque):
        yield f"sequence {len(value)};".encode()
        for item in value:
            yield from _pieces(item)
    elif is_dataclass(value):
        yield f"{type(value).__name__};".encode()
        for field in fields(value):
            yield from _pieces(getattr(value, field.name))
    else:
        raise TypeError(f"a state does not hold {type(value).__name__}: {value!r}")
