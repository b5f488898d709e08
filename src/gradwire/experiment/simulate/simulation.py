"""Runs an experiment on the simulator, from one evaluation to the next.

If the workers pause between steps, a run consists of segments. Between two segments every worker is
at the same step and no message is under way. So replicas, servers, clocks, NICs and ledger are the
whole state: it is evaluated, and saved in a checkpoint.

If they do not pause (asynchronous methods, or workers that crash and come back), a run is one
segment, and the model is evaluated while the workers continue. Such a run has no checkpoint: an
interrupted run starts again, and ends in the same bits.
"""

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradwire.core.errors import PeerLost, StoppedError
from gradwire.core.protocols import Replica
from gradwire.experiment.report.figures import counted, noted
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.given import Given, given_again, split_given
from gradwire.experiment.run.outcome import Progress, Run, config_of, summary_of
from gradwire.experiment.run.record import Record, Row, Say, warn
from gradwire.experiment.run.roles import AllNodes, Segment
from gradwire.experiment.run.setup import Experiment, prepare
from gradwire.experiment.run.threads import use_threads
from gradwire.experiment.run.together import BatchesTogether
from gradwire.experiment.simulate.losses import describe_loss, lost_with
from gradwire.experiment.simulate.what_if import WhatIf
from gradwire.experiment.timeline.store import nodes_of, write_spans
from gradwire.runtime.network.faults import Arrive, Crash
from gradwire.runtime.spans import SpanLog
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.runtime.virtual.sharing import SharedEngine, make_engine
from gradwire.runtime.virtual.spans import VirtualSpans
from gradwire.training.gradient import GradientRequest, GradientResult
from gradwire.training.program import Observer, rejoin
from gradwire.training.worker import TrainingWorker


def simulate(
    config: Config | None = None,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Run:
    """Trains on virtual workers and returns the result.

        run = gradwire.simulate(workers=8, compression="ef(topk(0.01))", bandwidth="100Mbit")
        run = gradwire.simulate(model=my_module, data=(train, test), workers=8)

    `settings` are the fields of `Config`; expressions may be given as strings or as objects,
    `TopK(0.01)`. `model` may be an `nn.Module` or a function that makes one, `data` a pair (train,
    test) of torch data sets or of pairs of tensors; `loss`, `metric` and `collate` may be
    functions. With `out`, the run leaves its records there.
    """
    texts, given = split_given(settings)
    return simulate_given(config_of(config, texts, "simulate"), given, out, progress)


def simulate_given(
    chosen: Config, given: Given, out: str | Path | None = None, progress: Progress | None = None
) -> Run:
    """`simulate` for a configuration, with the Python objects for which its texts stand."""
    if chosen.engine != "simulator":
        raise ValueError(
            f"simulate runs on the simulator, not on engine={chosen.engine!r}: gradwire.run"
        )
    if chosen.record_spans and out is None:
        raise ValueError("record_spans writes files into the record: give a folder, out=...")
    experiment = prepare(chosen, given)
    record = Record.create(Path(out), experiment.config) if out is not None else None
    return simulate_prepared(experiment, record, progress)


def simulate_prepared(
    experiment: Experiment,
    record: Record | None = None,
    progress: Progress | None = None,
    spans: SpanLog | None = None,
    observer: Observer | None = None,
) -> Run:
    """`simulate` for a configuration in which everything has been looked up.

    `spans` is filled with what every node does when. In runs that pause between steps `observer`
    learns when a worker finishes a step.
    """
    with use_threads(experiment.config.threads):
        simulation = _Simulation(experiment, record, spans)
        simulation.observer = observer or simulation.log
        return simulation.run(progress)


def resume(
    folder: str | Path,
    progress: Progress | None = None,
    *,
    restart: bool = False,
    say: Say = warn,
    **objects: Any,
) -> Run:
    """Resumes an interrupted run; it ends in the same bits as a run that was not interrupted.

    `objects` are the model, data, loss, metric and collate that it was given as Python objects.

    `restart` allows it to begin again from step 0 if its checkpoint is damaged or missing. `say`
    gets a message if it begins again, and one for each damaged file; by default these are warnings.
    The files of a finished run stay as they are. Its result is that of its last checkpoint, or is
    computed again if its method has no checkpoints.
    """
    record = Record.open(Path(folder))
    if record.config.engine != "simulator":
        raise ValueError(
            f"{folder} holds a run on real processes: resume it with gradwire run --resume "
            f"{folder}, or on each rank with gradwire.run(resume=...)"
        )
    experiment = prepare(record.config, given_again(record.config, objects))
    with use_threads(experiment.config.threads):
        simulation = _Simulation(experiment, record)
        was_finished = record.is_finished
        if was_finished:
            say(f"{folder} holds a run that had finished: its files stay as they are")
        simulation.restore(may_restart=restart, say=say)
        if was_finished:
            simulation.record = None
        return simulation.run(progress)


class _Simulation:
    def __init__(
        self, experiment: Experiment, record: Record | None, log: SpanLog | None = None
    ) -> None:
        self.experiment = experiment
        self.plan = experiment.plan
        self.config = experiment.config
        self.record = record
        network = experiment.network
        if log is None and self.config.record_spans:
            log = SpanLog(self.config.workers, network.size)
        self.log = log
        self.observer: Observer | None = log
        profile = self.plan.layer_profile
        layers = [] if profile is None else [layer.name for layer in profile.layers]
        self.spans = None if log is None else VirtualSpans(log, network, layers)
        assert experiment.charge is not None
        self.coding = experiment.charge.record
        self.engine = make_engine(
            experiment.host,
            experiment.network,
            self.config.workers,
            evaluate=self._gradients,
            profile=self.plan.layer_profile,
            has_priorities=self.plan.scheduling.has_priorities,
            seconds=self._seconds,
            coding=experiment.charge.time,
            record=bool(experiment.what_if),
            faults=experiment.faults,
            heartbeat_s=experiment.heartbeat_s,
            key=self.plan.key.child("faults"),
            on_crash=self._crashed,
            on_return=self._returned,
        )
        self.what_if = WhatIf(experiment)
        self.step = 0
        self.wall_s = 0.0
        self.metrics: list[Row] = []
        self.nodes = AllNodes(experiment)
        self.lost: list[Row] = []  # workers that crashed, and the residuals lost with them
        self.progress = [0] * self.config.workers  # steps that each worker has finished
        self.workers: dict[int, TrainingWorker] = {}  # in runs that do not pause
        self.progress_callback: Progress | None = None
        self.num_gradients = 0  # of workers before they crashed and came back
        self.wall_start = 0.0

    @property
    def _pauses(self) -> bool:
        """Whether all workers pause between two steps."""
        leave = any(isinstance(fault, Crash | Arrive) for fault in self.experiment.faults)
        return self.plan.pauses and not leave

    @property
    def _engines(self) -> tuple[VirtualEngine, ...]:
        return self.engine, *self.what_if.engines.values()

    def _gradients(self, requests: list[GradientRequest]) -> list[GradientResult]:
        """Those of a step; an accelerator then has work, so the next batches cost no time."""
        task, batch = self.plan.task, self.plan.batch
        results = task.gradients(requests)
        if task.device.type != "cpu" and isinstance(batch, BatchesTogether):
            batch.make_ahead(self.plan.num_steps * self.plan.accumulate)
        return results

    def _seconds(self, rank: int, request: GradientRequest) -> float:
        return self.experiment.computer.seconds(rank, request.key.step)

    def run(self, progress: Progress | None) -> Run:
        self.wall_start = time.perf_counter()
        self.progress_callback = progress
        try:
            if self._pauses:
                self._run_segments()
            else:
                self._run_continuously()
        except PeerLost as error:
            raise self._stopped(str(error)) from error
        if not self.engine.alive:
            raise self._stopped("all workers crashed")
        summary = self._summary()
        if self.record is not None:
            self.record.finish(summary)
            if self.log is not None:
                for recorded in nodes_of(self.log):
                    write_spans(self.record.folder, recorded)
        nodes, ledger, layout = self.nodes, self.engine.ledger, self.plan.task.layout
        model = nodes.model(self._present())
        return Run(self.config, self.metrics, summary, *model, nodes.replicas, ledger, layout)

    def _evaluate(self, now: float) -> None:
        """Adds a row of metrics to the record, with a checkpoint if there is one."""
        row = self.nodes.evaluate(
            self.step,
            self._present(),
            virtual_time_s=now,
            virtual_times_s=self.what_if.times_s,
            bytes_sent=self.engine.ledger.total_bytes,
            dropped_steps=max(replica.num_dropped for replica in self.nodes.replicas),
        )
        self.metrics.append(row)
        now_s = time.perf_counter()
        self.wall_s, self.wall_start = self.wall_s + now_s - self.wall_start, now_s
        if self.record is not None:
            self.record.append(row, self._checkpoint() if self._pauses else None)
        if self.progress_callback is not None:
            self.progress_callback(row, self.plan.num_steps)

    def _run_segments(self) -> None:
        """Evaluates after each segment."""
        while self.step < self.plan.num_steps:
            last = min(self.step + self.config.eval_every, self.plan.num_steps)
            programs = self.nodes.programs(Segment(self.step, last, self.observer))
            self.nodes.set_results(self.engine.run(*programs, spans=self.spans))
            self.step, self.progress = last, [last] * self.config.workers
            self.what_if.play(self.engine.trace)
            self._evaluate(self.engine.now)

    def _run_continuously(self) -> None:
        """Evaluates while the workers train, whenever `_num_done` passes a multiple of
        `eval_every`."""
        self.what_if.refuse()
        last = self.plan.num_steps
        programs = self.nodes.programs(Segment(0, last, self))
        come_back = partial(rejoin, self.plan, last=last, observer=self)
        results = self.engine.run(*programs, come_back, self.spans)
        self.nodes.set_results(results)
        self.step = self._num_done()
        # Servers may have finished the last round after the last worker did its part.
        self._evaluate(self.engine.now)

    def worker_started(self, worker: TrainingWorker) -> None:
        self.workers[worker.rank] = worker

    def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
        if self.log is not None:
            self.log.step_finished(rank, step, replica, now)
        self.nodes.workers[rank].replica = replica
        self.progress[rank] = max(self.progress[rank], step + 1)
        done, every = self._num_done(), self.config.eval_every
        if done // every > self.step // every and done < self.plan.num_steps:
            self.step = done
            self._evaluate(now)

    def _num_done(self) -> int:
        """The steps that the present workers have finished: all of them, or on average.

        If all wait for one another, idle workers may be ahead.
        """
        steps = [self.progress[rank] for rank in sorted(self.engine.alive)] or self.progress
        return min(steps) if self.plan.pauses else sum(steps) // len(steps)

    def _crashed(self, rank: int, now: float) -> None:
        replica = self.nodes.replicas[rank]
        if self.plan.ability == "push_pull" and rank in self.workers:
            # It may have pushed since its last step ended.
            exchange = self.workers[rank].client.exchange
            replica = replica if exchange is None else replica.having(exchange=exchange)
        row = {"rank": rank, "time_s": now, **lost_with(self.plan, replica)}
        self.lost.append(row)

    def _returned(self, rank: int, now: float) -> None:
        self.num_gradients += self.nodes.replicas[rank].num_gradients

    def _stopped(self, why: str) -> StoppedError:
        """The error of a run that cannot continue; it is in the record, too."""
        config, lost = self.config, ", ".join(map(describe_loss, self.lost))
        advice = (
            f"Allow for such losses with bsp(backup={len(self.lost)}) or bsp(timeout=1.0) on "
            "parameter_server, or take ssp, asp or gossip."
        )
        message = (
            f"{config.synchronization} on {config.architecture} stopped in step "
            f"{max(self.progress)} of {self.plan.num_steps}: {why}, and it cannot continue. "
            f"{lost}. "
        ) + (advice if self.engine.alive else "No worker is left.")
        error = StoppedError(message)
        if self.record is not None:
            self.record.finish_stopped(error, config, self.lost)
        return error

    def _present(self) -> list[Replica]:
        """The replicas of the workers that are there; of all of them if none is."""
        replicas = self.nodes.replicas
        return [replicas[rank] for rank in sorted(self.engine.alive)] or replicas

    def _summary(self) -> Row:
        last, measured = self.metrics[-1], self.experiment.measured
        num_gradients = sum(replica.num_gradients for replica in self.nodes.replicas)
        return summary_of(
            self.experiment,
            last,
            self.engine.ledger,
            num_gradients + self.num_gradients,
            virtual_time_s=self.engine.now,
            virtual_times_s=last["virtual_times_s"],
            coding=self.coding,
            compute_measured=None if measured is None else asdict(measured),
            threads=torch.get_num_threads(),
            lost=self.lost,
            **self._processor_time(),
            noted={**noted(self.nodes.servers), **counted(self.plan, self.nodes.replicas)},
            wall_time_s=self.wall_s,
            call_time_s=dict(self.engine.call_s),
        )

    def _processor_time(self) -> Row:
        """Of all nodes, where they share cores."""
        engine = self.engine
        return {"processor_time_s": engine.processor_s} if isinstance(engine, SharedEngine) else {}

    def _checkpoint(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "nodes": [role.snapshot() for role in self.nodes.roles],
            "engines": [engine.snapshot() for engine in self._engines],
            "ledger": self.engine.ledger.snapshot(),
            "metrics": self.metrics,
            "wall_s": self.wall_s,
            "call_s": dict(self.engine.call_s),
            "config": self.config.to_toml(),
            "coding": self.coding,
        }

    def restore(self, *, may_restart: bool, say: Say) -> None:
        """Continues from the checkpoint of the record, if there is one."""
        assert self.record is not None
        saved = self.record.resume(has_checkpoints=self._pauses, may_restart=may_restart, say=say)
        if saved is None:
            return
        if saved["config"] != self.config.to_toml():
            raise ValueError(
                f"{self.record.folder}: config.toml is not the configuration this run was started "
                "with; put it back, or start a new run"
            )
        if saved["coding"] != self.coding:
            raise ValueError(
                f"{self.record.folder}: this run charged coding by another table of costs "
                f"({saved['coding']}) than there is now ({self.coding}). Put the file back, or "
                "start a new run."
            )
        self.metrics = saved["metrics"]
        self.wall_s = saved["wall_s"]
        self.engine.call_s.update(saved["call_s"])
        self.step = saved["step"]
        for role, state in zip(self.nodes.roles, saved["nodes"], strict=True):
            role.restore(state)
        for engine, state in zip(self._engines, saved["engines"], strict=True):
            engine.restore(state)
        self.engine.ledger.restore(saved["ledger"])
