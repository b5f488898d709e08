"""Runs an experiment on the simulator, from one evaluation to the next.

Where the workers pause between steps a run is a fold over segments: between two of them every
worker stands at the same step and no message is under way, so the replicas, the servers, the
clocks, the NICs and the ledger are all there is. That is what is evaluated and what a checkpoint
holds.

Where they do not (asynchronous methods, or workers that crash and come back) a run is one segment,
and the model is looked at while it goes on. Such a run has no checkpoint: one that was interrupted
starts again, and ends in the same bits.
"""

import time
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gradwire.core.errors import PeerLost, StoppedError
from gradwire.core.node import Node
from gradwire.core.protocols import Replica
from gradwire.experiment.report.figures import counted, distance_of, noted, number
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.outcome import (
    Model,
    Progress,
    Run,
    config_of,
    metrics_row,
    summary_of,
    to_dict,
)
from gradwire.experiment.run.record import Record, Row, Say, warn
from gradwire.experiment.run.setup import Experiment, prepare
from gradwire.experiment.run.threads import use_threads
from gradwire.experiment.simulate.losses import describe_loss, lost_with
from gradwire.experiment.simulate.what_if import WhatIf
from gradwire.runtime.network.faults import Arrive, Crash
from gradwire.runtime.virtual.engine import Program, VirtualEngine
from gradwire.training.gradient import GradientRequest
from gradwire.training.program import rejoin, train
from gradwire.training.server import TrainingServer
from gradwire.training.worker import TrainingWorker


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
    chosen = config_of(config, settings, "simulate")
    if chosen.engine != "simulator":
        raise ValueError(
            f"simulate runs on the simulator, not on engine={chosen.engine!r}: gradwire.run"
        )
    experiment = prepare(chosen)
    record = Record.create(Path(out), experiment.config) if out is not None else None
    return simulate_prepared(experiment, record, progress)


def simulate_prepared(
    experiment: Experiment, record: Record | None = None, progress: Progress | None = None
) -> Run:
    """`simulate` for a configuration in which everything has been looked up."""
    with use_threads(experiment.config.threads):
        return _Simulation(experiment, record).run(progress)


def resume(
    folder: str | Path,
    progress: Progress | None = None,
    *,
    restart: bool = False,
    say: Say = warn,
) -> Run:
    """Goes on with an interrupted run; it ends in the same bits as one that was not.

    `restart` allows it to begin again from step 0 if its checkpoint is damaged or missing. `say`
    gets a message if it begins again, and one for each damaged file; by default these are warnings.
    The same if the run had finished: then the files stay as they are, and the result is that of its
    last checkpoint, or is computed again if its method has none.
    """
    record = Record.open(Path(folder))
    if record.config.engine != "simulator":
        raise ValueError(
            f"{folder} holds a run on real processes: go on with gradwire run --resume {folder}, "
            "or on each rank with gradwire.run(resume=...)"
        )
    experiment = prepare(record.config)
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
    def __init__(self, experiment: Experiment, record: Record | None) -> None:
        self.experiment = experiment
        self.plan = experiment.plan
        self.config = experiment.config
        self.record = record
        assert experiment.charge is not None
        self.coding = experiment.charge.record
        self.engine = VirtualEngine(
            experiment.network,
            self.config.workers,
            evaluate=self.plan.task.gradients,
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
        self.replicas = self.plan.initial_replicas()
        architecture = self.plan.architecture
        holds_model = self.plan.ability == "push_pull"
        self.servers = [
            TrainingServer(self.plan, number)
            for number in range(architecture.num_servers if holds_model else 0)
        ]
        # What nodes that are neither workers nor such servers keep.
        self.kept: list[dict[Any, Any]] = [{} for _ in range(architecture.num_others)]
        self.lost: list[Row] = []  # what went with workers that crashed
        self.progress = [0] * self.config.workers  # steps that each worker has behind it
        self.workers: dict[int, TrainingWorker] = {}  # those that are looked at while they train
        self.progress_callback: Progress | None = None
        self.num_gradients = 0  # of workers before they crashed and came back
        self.wall_start = 0.0

    @property
    def _pauses(self) -> bool:
        """Whether all stand still between two steps."""
        leave = any(isinstance(fault, Crash | Arrive) for fault in self.experiment.faults)
        return self.plan.pauses and not leave

    @property
    def _engines(self) -> tuple[VirtualEngine, ...]:
        return self.engine, *self.what_if.engines.values()

    def _seconds(self, rank: int, request: GradientRequest) -> float:
        return self.experiment.computer.seconds(rank, request.key.step)

    def run(self, progress: Progress | None) -> Run:
        self.wall_start = time.perf_counter()
        try:
            if self._pauses:
                while self.step < self.plan.num_steps:
                    last = min(self.step + self.config.eval_every, self.plan.num_steps)
                    self._segment(last)
                    self._note(self._measure(self.engine.now), progress)
            else:
                self._whole(progress)
        except PeerLost as error:
            raise self._stopped(str(error)) from error
        if not self.engine.alive:
            raise self._stopped("all workers crashed")
        summary = self._summary()
        if self.record is not None:
            self.record.finish(summary)
        params, buffers = self._model()
        return Run(
            self.config, self.metrics, summary, params, buffers, self.replicas, self.engine.ledger
        )

    def _note(self, row: Row, progress: Progress | None) -> None:
        """A row of metrics, for the record and whoever looks on."""
        self.metrics.append(row)
        now = time.perf_counter()
        self.wall_s, self.wall_start = self.wall_s + now - self.wall_start, now
        if self.record is not None:
            self.record.append(row, self._checkpoint() if self._pauses else None)
        if progress is not None:
            progress(row, self.plan.num_steps)

    def _segment(self, last: int) -> None:
        def program(node: Node) -> Coroutine[Any, Any, Replica]:
            return train(self.plan, node, self.replicas[node.rank], self.step, last)

        self.replicas = self.engine.run([program] * self.config.workers, self._daemons())
        self.step, self.progress = last, [last] * self.config.workers
        self.what_if.play(self.engine.trace)

    def _whole(self, progress: Progress | None) -> None:
        """The run in one piece; evaluations when as many steps are done as in so many rounds."""
        self.what_if.refuse()
        self.progress_callback = progress
        last = self.plan.num_steps

        def program(node: Node) -> Coroutine[Any, Any, Replica]:
            return train(self.plan, node, self.replicas[node.rank], 0, last, self)

        def comeback(node: Node) -> Coroutine[Any, Any, Replica]:
            return rejoin(self.plan, node, last, self)

        programs = [program] * self.config.workers
        results = self.engine.run(programs, self._daemons(), comeback)
        for rank, replica in enumerate(results):
            if replica is not None:
                self.replicas[rank] = replica
        self.step = self._done()
        # Servers may have finished the last round after the last worker did its part.
        self._note(self._measure(self.engine.now), progress)

    def begins(self, worker: TrainingWorker) -> None:
        self.workers[worker.rank] = worker

    def stepped(self, rank: int, step: int, replica: Replica, now: float) -> None:
        self.replicas[rank] = replica
        self.progress[rank] = max(self.progress[rank], step + 1)
        done, every = self._done(), self.config.eval_every
        if done // every > self.step // every and done < self.plan.num_steps:
            self.step = done
            self._note(self._measure(now), self.progress_callback)

    def _done(self) -> int:
        """The steps that the workers that are there have behind them: all of them, or on average.

        Where all wait for one another those that idle may run ahead.
        """
        steps = [self.progress[rank] for rank in self._present()] or self.progress
        return min(steps) if self.plan.pauses else sum(steps) // len(steps)

    def _daemons(self) -> list[Program[Any]]:
        """The programs of the nodes that are no workers."""
        architecture, first = self.plan.architecture, self.config.workers
        limits = self.plan.limits() if architecture.num_others else None

        def daemon(node: Node) -> Coroutine[Any, Any, None]:
            number = node.rank - first
            if number < len(self.servers):
                return self.servers[number].run(node)
            return architecture.daemon(node, self.kept[number], limits)

        return [daemon] * architecture.num_others

    def _crashed(self, rank: int, now: float) -> None:
        replica = self.replicas[rank]
        if self.plan.ability == "push_pull" and rank in self.workers:
            # It may have pushed since its last step ended.
            exchange = self.workers[rank].client.exchange
            replica = replica if exchange is None else replica.having(exchange=exchange)
        row = {"rank": rank, "time_s": now, **lost_with(self.plan, replica)}
        self.lost.append(row)

    def _returned(self, rank: int, now: float) -> None:
        self.num_gradients += self.replicas[rank].num_gradients

    def _stopped(self, why: str) -> StoppedError:
        """The end of a run that cannot go on; the record says so too."""
        config, lost = self.config, ", ".join(map(describe_loss, self.lost))
        advice = (
            f"Allow for such losses with bsp(backup={len(self.lost)}) or bsp(timeout=1.0) on "
            "parameter_server, or take ssp, asp or gossip."
        )
        message = (
            f"{config.synchronization} on {config.architecture} stopped in step "
            f"{max(self.progress)} of {self.plan.num_steps}: {why}, and it cannot go on. {lost}. "
        ) + (advice if self.engine.alive else "Nobody is left to train.")
        error = StoppedError(message)
        if self.record is not None:
            self.record.finish_stopped(error, config, self.lost)
        return error

    def _present(self) -> list[int]:
        """The workers that are there."""
        return sorted(self.engine.alive)

    def _model(self) -> Model:
        """What is kept, and evaluated except under gossip: what the servers hold, or what one
        worker has or was sent."""
        present = [self.replicas[rank] for rank in self._present()] or self.replicas
        if self.servers:
            shards = [server.params for server in self.servers]
            return torch.cat(shards), present[0].buffers
        newest = self.plan.synchronization.newest(present)
        return self.plan.synchronization.agreed(newest), newest.buffers

    def _models(self, present: list[Replica]) -> list[Model]:
        """What is evaluated: under gossip the models of all workers that are there."""
        if not self.plan.mixes:
            return [self._model()]
        agreed = self.plan.synchronization.agreed
        return [(agreed(replica), replica.buffers) for replica in present]

    def _measure(self, now: float) -> Row:
        present = [self.replicas[rank] for rank in self._present()]
        return metrics_row(
            self.experiment,
            self.step,
            self._models(present),
            [float(r.loss) for r in present if r.loss is not None],
            virtual_time_s=now,
            virtual_times_s=self.what_if.times_s,
            bytes_sent=self.engine.ledger.total_bytes,
            distance=number(distance_of([replica.params for replica in present])),
            dropped_steps=max(replica.num_dropped for replica in self.replicas),
        )

    def _summary(self) -> Row:
        last, measured = self.metrics[-1], self.experiment.measured
        num_gradients = sum(replica.num_gradients for replica in self.replicas)
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
            noted={**noted(self.servers), **counted(self.experiment.plan, self.replicas)},
            wall_time_s=self.wall_s,
            call_time_s=dict(self.engine.call_s),
        )

    def _checkpoint(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "replicas": [to_dict(replica) for replica in self.replicas],
            "servers": [server.snapshot() for server in self.servers],
            "kept": self.kept,
            "engines": [engine.snapshot() for engine in self._engines],
            "ledger": self.engine.ledger.snapshot(),
            "metrics": self.metrics,
            "wall_s": self.wall_s,
            "call_s": dict(self.engine.call_s),
            "config": self.config.to_toml(),
            "coding": self.coding,
        }

    def restore(self, *, may_restart: bool, say: Say) -> None:
        """Goes on from the checkpoint of the record, if there is one."""
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
        self.replicas = [Replica(**values) for values in saved["replicas"]]
        for server, state in zip(self.servers, saved["servers"], strict=True):
            server.restore(state)
        self.kept = saved["kept"]
        for engine, state in zip(self._engines, saved["engines"], strict=True):
            engine.restore(state)
        self.engine.ledger.restore(saved["ledger"])
