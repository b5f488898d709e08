"""Replays runs on real processes in one process, from the event orders that they recorded.

With `record_order` every rank of a real run writes `order-RANK.jsonl` into the record
(`runtime/replay/order.py`). From these files and the configuration `replay` runs the programs of
all ranks again. It compares the final state of every rank, bit by bit, and the bytes that it sent
on every link. For a rank that was killed neither is known; it is replayed as far as its file goes.
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
from gradwire.experiment.report.figures import counted, noted
from gradwire.experiment.run.outcome import Run, summary_of, use_threads
from gradwire.experiment.run.record import Record, Row, Say, warn
from gradwire.experiment.run.roles import AllNodes, NodeRole, Segment
from gradwire.experiment.run.setup import Experiment, prepare
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.replay.engine import ReplayEngine
from gradwire.runtime.replay.order import EventOrder, OrderError, Recorder, RunOrder, load
from gradwire.runtime.storage.files import write_atomically
from gradwire.runtime.storage.text import LineSeal
from gradwire.training.worker import TrainingWorker

_NOT_RECORDED = "not recorded"  # key of the reason, in a file without an order


def order_path(folder: Path, rank: int) -> Path:
    return folder / f"order-{rank}.jsonl"


def make_recorder(
    folder: Path,
    experiment: Experiment,
    rank: int,
    step: int,
    *,
    is_in_segment: bool = False,
    say: Say = warn,
) -> Recorder | None:
    """The recorder of a rank's event order, from this step on.

    `is_in_segment`: this is a server that continues from its own state. Messages that it received
    before are not replayed, so its order would be incomplete, and none is recorded; `say` reports
    that.
    """
    path, layout = order_path(folder, rank), experiment.plan.layout
    about = experiment.config.to_toml()
    try:
        if is_in_segment:
            raise OrderError(
                f"{layout.name_of(rank)} was started again, and continued from a state that it had "
                "saved: the order of what it received before is lost"
            )
        if step and (reason := _why_not_recorded(path)):
            raise OrderError(reason)
        return Recorder(path, rank, layout.size, layout.num_workers, about, step)
    except OrderError as error:
        say(f"the order of this run is not complete and no longer recorded: {error}")
        line = json.dumps({_NOT_RECORDED: str(error)})
        write_atomically(path, LineSeal().seal(line).encode())
        return None


def _why_not_recorded(path: Path) -> str:
    """Why this file has no order; "": it has one, or is something else."""
    try:
        with path.open(encoding="utf-8") as file:
            line = LineSeal().open(file.readline().removesuffix("\n"))
        head = None if line is None else json.loads(line)
    except (OSError, ValueError):
        return ""
    return str(head.get(_NOT_RECORDED, "")) if isinstance(head, dict) else ""


@contextmanager
def record_order(
    engine: ProcessEngine, recorder: Recorder | None, first: int, last: int
) -> Iterator[None]:
    """Records what the engine runs in this block, as the steps first .. last - 1."""
    if recorder is not None:
        recorder.steps = (first, last)
    engine.log = recorder
    try:
        yield
    finally:
        engine.log = None


def finish_recording(recorder: Recorder | None, role: NodeRole) -> None:
    """Writes the digest of the final state of a rank."""
    if recorder is not None:
        recorder.result(digest_of(role.snapshot()))
        recorder.close()


@dataclass(frozen=True)
class Replayed:
    """The result of a replay, and its differences from the real run."""

    run: Run
    differs: tuple[str, ...]
    compared: str  # a description of what was compared

    @property
    def is_equal(self) -> bool:
        return not self.differs


def replay(folder: str | Path) -> Replayed:
    """Computes the recorded run in this folder again."""
    record = Record.open(Path(folder))
    began = time.perf_counter()
    summary, orders = _read_summary(record), _read_orders(record)
    with use_threads(summary.get("threads", 0)):
        return _replay(prepare(record.config), orders, summary, began)


def _replay(
    experiment: Experiment, orders: list[EventOrder], summary: Row, began: float
) -> Replayed:
    plan, lost = experiment.plan, _lost_ranks(summary)
    _check(experiment, orders)
    nodes = AllNodes(experiment)
    engine = ReplayEngine(orders, evaluate=plan.task.gradients)
    for first, last in engine.steps:
        nodes.set_results(engine.run(*nodes.programs(Segment(first, last, _NoObserver()))))
    present = [rank for rank in range(len(orders)) if rank not in lost]
    differs = [
        f"rank {rank}"
        for rank in present
        if orders[rank].result != digest_of(nodes.roles[rank].snapshot())
    ]
    sent, expected = engine.ledger.link_bytes, summary["bytes_by_link"]
    differs += [f"bytes that rank {rank} sent" for rank in present if sent[rank] != expected[rank]]
    replicas = [replica for rank, replica in enumerate(nodes.replicas) if rank not in lost]
    row = nodes.evaluate(
        engine.steps[-1][1] if engine.steps else 0,
        replicas,
        time_s=engine.now,
        bytes_sent=engine.ledger.total_bytes,
        dropped_steps=max(replica.num_dropped for replica in replicas),
    )
    compared = _describe_comparison(lost)
    again = summary_of(
        experiment,
        row,
        engine.ledger,
        # In the run, only servers have counted the gradients of a worker that was lost.
        summary["gradients"] if lost else sum(replica.num_gradients for replica in replicas),
        noted={**noted(nodes.servers), **counted(plan, replicas)},
        wall_time_s=time.perf_counter() - began,
        replay_differs=differs,
        replay_compared=compared,
    )
    # Times are those of the real run.
    merged, model = {**summary, **again}, nodes.model(replicas)
    layout = plan.task.layout
    run = Run(experiment.config, [row], merged, *model, replicas, engine.ledger, layout)
    return Replayed(run, tuple(differs), compared)


def _describe_comparison(lost: frozenset[int]) -> str:
    if not lost:
        return "every rank, bit by bit, and the bytes on every link"
    ranks = ", ".join(map(str, sorted(lost)))
    return f"every rank but the lost ({ranks}), bit by bit, and the bytes that they sent"


def _read_summary(record: Record) -> Row:
    if not record.has_summary:
        raise ValueError(f"{record.folder}: the run has not come to its end, or not been recorded")
    summary = record.summary
    if "stopped" in summary:
        raise ValueError(
            f"{record.folder}: the run stopped before its end, so it cannot be replayed: "
            f"{summary['stopped']}"
        )
    if summary.get("resumed_from_servers"):
        raise ValueError(
            f"{record.folder}: the run continued from the state of the servers of another job, "
            "and only runs whose workers begin with the first step can be replayed"
        )
    back = [row["rank"] for row in summary["lost"] if "back_s" in row]
    if back:
        raise ValueError(
            f"{record.folder}: worker {back[0]} was lost and came back, and only runs without "
            "workers that come back can be replayed"
        )
    return summary


def _lost_ranks(summary: Row) -> frozenset[int]:
    """The ranks that were killed."""
    return frozenset(row["rank"] for row in summary["lost"])


def _read_orders(record: Record) -> list[EventOrder]:
    first = order_path(record.folder, 0)
    if not first.exists():
        raise ValueError(
            f"{record.folder} holds no recorded order: there is no {first.name} in it. Run it with "
            "--engine process --record-order."
        )
    lost = _lost_ranks(_read_summary(record))
    num_nodes = _load_order(first, was_killed=True).num_nodes
    orders = [
        _load_order(order_path(record.folder, rank), was_killed=rank in lost)
        for rank in range(num_nodes)
    ]
    runs = next(order.runs for order in orders if order.rank not in lost)
    return [_pad(order, runs) if order.rank in lost else order for order in orders]


def _load_order(path: Path, *, was_killed: bool) -> EventOrder:
    if why := _why_not_recorded(path):
        raise ValueError(f"{path}: this run cannot be replayed. Its order is not complete: {why}")
    return load(path, was_killed=was_killed)


def _pad(order: EventOrder, runs: Sequence[RunOrder]) -> EventOrder:
    """The order of a rank that was killed, with empty runs for those that it did not reach."""
    missing = (RunOrder((), None, run.steps) for run in runs[len(order.runs) :])
    return replace(order, runs=(*order.runs, *missing))


def _check(experiment: Experiment, orders: list[EventOrder]) -> None:
    expected = experiment.plan.layout.size
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


class _NoObserver:
    """Does nothing. For an observer, programs ask for the time after each step; so they did when
    the order was recorded."""

    def worker_started(self, worker: TrainingWorker) -> None:
        pass

    def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
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
