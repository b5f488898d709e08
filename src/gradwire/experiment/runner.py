"""Runs an experiment on the simulator, from one evaluation to the next.

A run is a fold over segments: between two of them every worker stands at the same step and no
message is under way, so the replicas, the clocks, the NICs and the ledger are all there is. That
is what is evaluated and what a checkpoint holds.
"""

import contextlib
import math
import platform
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradwire
from gradwire import kernels
from gradwire.core.node import Node
from gradwire.core.notation import Expression
from gradwire.core.protocols import Replica
from gradwire.experiment.config import Config
from gradwire.experiment.record import Record, Row
from gradwire.experiment.setup import Experiment, prepare
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.virtual import VirtualEngine
from gradwire.training.gradient import GradientRequest

Progress = Callable[[Row, int], None]  # a row of metrics, and the number of steps in all


@dataclass(frozen=True)
class Run:
    """What came out."""

    config: Config  # as resolved
    metrics: list[Row]
    summary: Row
    params: Tensor  # [d], what the workers agreed on last
    buffers: Mapping[str, Tensor]  # running statistics of rank 0
    replicas: list[Replica]
    ledger: Ledger

    @property
    def bytes_sent(self) -> int:
        """By all workers, in the whole run."""
        return self.ledger.total_bytes

    @property
    def virtual_time_s(self) -> float:
        time_s: float = self.summary["virtual_time_s"]
        return time_s

    @property
    def accuracy(self) -> float:
        """On the test set, at the end."""
        accuracy: float = self.summary["test_accuracy"]
        return accuracy


def simulate(
    config: Config | None = None,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Trains on virtual workers and returns what came out.

        run = gradwire.simulate(workers=8, compression="ef(topk(0.01))", bandwidth="100Mbit")

    `settings` are the fields of `Config`; expressions may be given as strings or as objects,
    `TopK(0.01)`. With `out`, the run leaves its records there.
    """
    written = {n: repr(v) if isinstance(v, Expression) else v for n, v in settings.items()}
    values = {**(asdict(config) if config else {}), **written}
    chosen = Config.from_dict(values, "simulate")
    with use_threads(chosen.threads):
        experiment = prepare(chosen)
        record = Record.create(Path(out), experiment.config) if out is not None else None
        return _Simulation(experiment, record).run(progress)


def resume(folder: str | Path, progress: Progress | None = None) -> Run:
    """Goes on with an interrupted run; it ends in the same bits as one that was not."""
    record = Record.open(Path(folder))
    with use_threads(record.config.threads):
        return _Simulation(prepare(record.config), record).run(progress)


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Lets torch use so many CPU threads for a while; 0: as many as it uses now."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Simulation:
    def __init__(self, experiment: Experiment, record: Record | None) -> None:
        self.experiment = experiment
        self.plan = experiment.plan
        self.config = experiment.config
        self.record = record
        self.engine = VirtualEngine(
            experiment.network,
            evaluate=self.plan.task.gradients,
            seconds=self._seconds,
            charge_calls=self.config.charge_coding,
            record=bool(experiment.what_if),
        )
        # The same run on other networks: clocks only, played from the trace of each segment.
        self.others = {name: VirtualEngine(net) for name, net in experiment.what_if.items()}
        self.step = 0
        self.wall_s = 0.0
        self.metrics: list[Row] = []
        self.replicas = self.plan.initial_replicas()

    def _seconds(self, rank: int, request: GradientRequest) -> float:
        return self.experiment.computer.seconds(rank, request.key.step)

    def run(self, progress: Progress | None) -> Run:
        start = time.perf_counter()
        if self.record is not None:
            self._restore()
        while self.step < self.plan.num_steps:
            self._segment(min(self.step + self.config.eval_every, self.plan.num_steps))
            row = self._measure()
            self.metrics.append(row)
            self.wall_s, start = self.wall_s + time.perf_counter() - start, time.perf_counter()
            if self.record is not None:
                self.record.append(row, self._checkpoint())
            if progress is not None:
                progress(row, self.plan.num_steps)
        summary = self._summary()
        if self.record is not None:
            self.record.finish(summary)
        params, buffers = self._model()
        return Run(
            self.config, self.metrics, summary, params, buffers, self.replicas, self.engine.ledger
        )

    def _segment(self, last: int) -> None:
        def program(node: Node) -> Coroutine[Any, Any, Replica]:
            return self.plan.train(node, self.replicas[node.rank], self.step, last)

        self.replicas = self.engine.run([program] * self.config.workers)
        self.step = last
        for engine in self.others.values():
            trace = self.engine.trace
            assert trace is not None
            if not trace.replayable:
                raise ValueError(
                    f"what_if: what {self.config.synchronization} does depends on the network; "
                    "run it once for each bandwidth"
                )
            engine.run([trace.replay] * self.config.workers)

    def _model(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """What is evaluated and kept: nothing in it that rank 0 has not got or been sent."""
        first = self.replicas[0]
        return self.plan.synchronization.agreed(first), first.buffers

    def _measure(self) -> Row:
        test = self.plan.task.evaluate(*self._model(), self.experiment.test_batches())
        losses = [float(r.loss) for r in self.replicas if r.loss is not None]
        return {
            "step": self.step,
            "epoch": self.step / self.experiment.steps_per_epoch,
            "virtual_time_s": self.engine.now,
            "virtual_times_s": {name: engine.now for name, engine in self.others.items()},
            "bytes_sent": self.engine.ledger.total_bytes,
            "train_loss": _number(sum(losses) / len(losses)) if losses else None,
            "test_loss": _number(test.loss),
            "test_accuracy": test.accuracy,
            "dropped_steps": max(replica.num_dropped for replica in self.replicas),
        }

    def _summary(self) -> Row:
        ledger, last = self.engine.ledger, self.metrics[-1]
        worker_steps = self.config.workers * self.plan.num_steps
        return {
            "config": asdict(self.config),
            "steps": self.plan.num_steps,
            "parameters": self.replicas[0].params.numel(),
            "test_accuracy": last["test_accuracy"],
            "test_loss": last["test_loss"],
            "virtual_time_s": self.engine.now,
            "virtual_times_s": last["virtual_times_s"],
            "bytes_sent": ledger.total_bytes,
            "bytes_per_worker_step": ledger.total_bytes / worker_steps,
            "messages_sent": ledger.total_messages,
            "bytes_by_link": ledger.link_bytes,
            "bytes_by_tensor": dict(ledger.tensor_bytes),
            "dropped_steps": last["dropped_steps"],
            "wall_time_s": self.wall_s,
            "call_time_s": dict(self.engine.call_s),
            "kernels": kernels.backend(),
            "versions": {
                "gradwire": gradwire.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

    def _checkpoint(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "replicas": [_to_dict(replica) for replica in self.replicas],
            "engines": [_engine_state(engine) for engine in (self.engine, *self.others.values())],
            "ledger": self.engine.ledger.snapshot(),
            "metrics": self.metrics,
            "wall_s": self.wall_s,
            "call_s": dict(self.engine.call_s),
            "config": self.config.to_toml(),
        }

    def _restore(self) -> None:
        assert self.record is not None
        saved = self.record.resume()
        if saved is None:
            return
        if saved["config"] != self.config.to_toml():
            raise ValueError(
                f"{self.record.folder}: config.toml is not the configuration this run was started "
                "with; put it back, or start a new run"
            )
        self.metrics = saved["metrics"]
        self.wall_s = saved["wall_s"]
        self.engine.call_s.update(saved["call_s"])
        self.step = saved["step"]
        self.replicas = [Replica(**values) for values in saved["replicas"]]
        engines = (self.engine, *self.others.values())
        for engine, state in zip(engines, saved["engines"], strict=True):
            engine.clocks = list(state["clocks"])
            engine.nics.restore(state["nics"])
        self.engine.ledger.restore(saved["ledger"])


def _number(value: float) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if math.isfinite(value) else None


def _to_dict(replica: Replica) -> dict[str, Any]:
    # Not `asdict`, which copies: replicas that share a tensor share it in the file as well.
    return {field.name: getattr(replica, field.name) for field in fields(replica)}


def _engine_state(engine: VirtualEngine) -> dict[str, Any]:
    return {"clocks": list(engine.clocks), "nics": engine.nics.snapshot()}
