"""One node of a run on real processes, whatever its role, from the first agreement to the summary.

Where the workers pause between steps a run is a fold over segments, as on the simulator. Between
two of them the nodes agree (agreement.py) on what comes next. At these points nothing is under way,
so the state of a node is all there is: a checkpoint holds it, with the number of the next step.
From that number follow the position in the data and every random draw.

Where they do not pause (asynchronous methods) a run is one segment. Rank 0 keeps the models it had
on its way, and they are evaluated at the end. Workers may be lost and come back meanwhile, where
servers hold the model. What is left of an interrupted run is the servers' state: after a signal
workers end between two steps, and servers when they have heard all that those had to say.

Evaluations, checkpoints and agreements do not count as time of training, nor in the ledger.
"""

import io
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.core.errors import LostError, PeerLost, RefusedError
from gradwire.core.node import Framed
from gradwire.core.protocols import Replica
from gradwire.core.wire import ANSWER, Failed
from gradwire.experiment.agreement import Agreement
from gradwire.experiment.checkpoints import Checkpoints
from gradwire.experiment.conductor import Conductor, Reports
from gradwire.experiment.machine import name_of, why_lost
from gradwire.experiment.outcome import Progress, Run
from gradwire.experiment.parts import Part, ServerPart, WorkerPart, part_of
from gradwire.experiment.record import Record, Row, write_atomically
from gradwire.experiment.replay import finish, recorded, recorder
from gradwire.experiment.setup import Experiment, warm_up
from gradwire.experiment.signals import Interrupted, Signals
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.order import Recorder
from gradwire.runtime.process.engine import ProcessEngine, StuckError
from gradwire.runtime.process.frames import tag_hash
from gradwire.runtime.process.transport import Transport
from gradwire.runtime.requests import no_evaluator
from gradwire.training.worker import TrainingWorker

_THIS, _ANOTHER = "this run", "another run"  # what a folder holds
_RUNS_BEFORE = 3  # of the engine, before the one segment of a run that does not pause
_STEP_S, _LEAVE_S = 1.0, 3.0  # after a signal: how long a step may take, and all workers
_SERVERS_STATE = 0  # the step under which servers leave their state when a signal ends such a run


class Counting(Transport, Protocol):
    """A transport that counts what it sends."""

    @property
    def num_bytes_sent(self) -> int: ...


class Where(NamedTuple):
    """The folder of a run."""

    folder: Path | None
    resumes: bool = False
    is_restart: bool = False


class _Glimpse(NamedTuple):
    """What a rank keeps of a step that it passes."""

    time_s: float
    num_bytes: int
    loss: float | None
    num_dropped: int
    model: list[Tensor]  # on rank 0


class NodeRun:
    """One node of a run. `prepared` is the experiment, or why there is none."""

    def __init__(
        self,
        prepared: Experiment | str,
        transport: Counting,
        num_workers: int,
        where: Where,
        *,
        checkpoint_every_s: float,
        timeout_s: float,
        signals: Signals,
        progress: Progress | None = None,
        say: Callable[[str], None] = lambda text: None,
        life: float = 0.0,  # of who comes later: when that was
        wrap: Callable[[Any], Any] = lambda program: program,  # what is to be done around programs
        native: bool = False,
        keep: Path | None = None,  # where a server that survives has its files
    ) -> None:
        self.rank = transport.rank
        self.transport = transport
        self.signals = signals
        self.where = where
        self.failure = prepared if isinstance(prepared, str) else ""
        if not isinstance(prepared, str):
            self.experiment = prepared
        self.engine = ProcessEngine(
            transport,
            num_workers,
            evaluate=no_evaluator if self.failure else self.experiment.plan.task.gradients,
            timeout_s=timeout_s,
            native=native,
        )
        self.engine.on_change = self._changed
        has_others = transport.size > num_workers
        self.hub = transport.size - 1 if has_others else 0  # who keeps the record
        pauses = bool(self.failure) or self.experiment.plan.pauses
        self.agreement = Agreement(self.engine, self.hub, may_miss=has_others and not pauses)
        self.folder: Path | None = None
        self.checkpoints: Checkpoints | None = None
        self.step = 0
        self.last = 0  # of the segment that is under way
        self.at = 0  # the step that is under way
        self.is_inside = False  # a segment
        self.saved_step = 0
        self.began_s = 0.0  # the last segment, on the engine's clock
        self.segment_steps = 0
        self.step_s = 0.0  # of one step in the last segment
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds, and bytes
        self.metrics: list[Row] = []  # as of the checkpoint
        self.glimpses: dict[int, _Glimpse] = {}
        self.lost: list[Row] = []
        self.started_s = time.perf_counter()
        self.log: Recorder | None = None  # of the order in which things happen
        self._every_s = checkpoint_every_s
        self._progress, self._say = progress, say
        self._life = life
        self._wrap = wrap
        self._keep = keep
        self._is_over = False  # the one segment of a run that does not pause
        self._comes_back = False  # whether workers begin with what the servers have
        self._conductor: Conductor | None = None  # on the hub
        self._record: Record | None = None

    @property
    def is_hub(self) -> bool:
        return self.rank == self.hub

    # The run.

    def run(self, state: dict[str, Any] | None = None) -> Run:
        """From the beginning; or, for a server that begins again, from its state in a segment."""
        try:
            if state is not None:
                self._reenter(state)
            elif self._life and self.rank < self.engine.num_workers:
                self._come_late()
            else:
                self._begin()
                self.part: Part = part_of(self.plan, self.rank)
                self._restore()
            if self.config.record_order and self.folder is not None:
                self.log = recorder(self.folder, self.experiment, self.rank, self.step)
            if self.rank < self.config.workers:
                warm_up(self.plan, self.rank)
            if self.plan.pauses:
                self._fold()
            else:
                self._whole()
            return self._finish()
        except PeerLost as error:
            raise self._stopped(why_lost(error, self._name), error.rank) from error
        except StuckError as error:
            raise self._stopped(str(error), None) from error

    def _fold(self) -> None:
        with self.signals.waiting():
            if self.is_inside:
                self._segment(self.last)
            while True:
                decision = self._agree()
                if decision["evaluate"]:
                    self._evaluate(decision)
                if decision["checkpoint"]:
                    self._save()
                if decision["evaluate"] or decision["checkpoint"]:
                    self.agreement.agree({}, lambda reports: {})  # all are done with it
                    if self.checkpoints is not None:
                        self.checkpoints.forget_old()
                if decision["signal"]:
                    raise Interrupted(decision["signal"], self._how_to_go_on())
                if self.step == self.plan.num_steps:
                    return
                self._segment(decision["last"])

    def _whole(self) -> None:
        with self.signals.waiting():
            self.engine.on_wait = self._glance
            try:
                if not self.is_inside:
                    self.agreement.agree({}, lambda reports: {})  # all begin together
                self.agreement.absent.clear()
                self._segment(self.plan.num_steps)
                self._is_over = True
                self._glance()
                self._sum_up()
            except (Interrupted, PeerLost, LostError, StuckError):
                self._save_servers()
                raise
            finally:
                self.engine.on_wait = None

    def _glance(self) -> None:
        """While all programs wait, in a run that does not pause."""
        if not self.signals.wanted:
            return
        waited_s = time.monotonic() - self.signals.told_s
        workers = range(self.engine.num_workers)
        if self.rank in workers:
            is_time = waited_s > _STEP_S
        else:
            is_time = waited_s > _LEAVE_S or self.engine.gone.issuperset(workers)
        if is_time:
            self._stop()

    def _stop(self) -> None:
        raise Interrupted(self.signals.wanted, self._how_to_go_on())

    def _sum_up(self) -> None:
        """Looks back on the one segment, and evaluates what came out."""
        figures = {str(step): glimpse[:-1] for step, glimpse in self.glimpses.items()}
        reports: Reports = []

        def note(received: Reports) -> Row:
            nonlocal reports
            reports = received
            workers = received[: self.config.workers]
            return {
                "steps": [] if workers[0] is None else list(workers[0]),
                "num_there": sum(report is not None for report in workers),
            }

        decision = self.agreement.agree(figures, note)
        if not decision["num_there"]:
            raise self._stopped("all workers were lost", None)
        self._look_back(decision["steps"], reports)
        self._evaluate(self._agree())

    def _segment(self, last: int) -> None:
        """Trains on to a step."""
        engine, transport, spent = self.engine, self.transport, self.spent
        before = engine.compute_s, engine.wait_s, transport.num_bytes_sent
        self.began_s = engine.now
        began = time.perf_counter()
        self.last, self.is_inside = last, True
        program = self.part.program(self.step, last, self, self._comes_back, self._life)
        with recorded(engine, self.log, self.step, last):
            result = engine.run(lambda node: self._wrap(program(node)))
        self.is_inside = False
        seconds = time.perf_counter() - began
        self.part.took(result)
        spent["training_s"] += seconds
        spent["compute_s"] += engine.compute_s - before[0]
        spent["wait_s"] += engine.wait_s - before[1]
        spent["handed_nbytes"] += transport.num_bytes_sent - before[2]
        self.segment_steps = last - self.step
        self.step_s = seconds / self.segment_steps
        self.step = self.at = last

    def begins(self, worker: TrainingWorker) -> None:
        pass

    def stepped(self, rank: int, step: int, replica: Replica, now: float) -> None:
        self.at = done = step + 1
        if self.signals.wanted and not self.plan.pauses:
            raise Interrupted(self.signals.wanted, "The others may go on without this worker.")
        if self.plan.pauses or done % self.config.eval_every or done == self.plan.num_steps:
            return
        model = [self.plan.synchronization.agreed(replica), *replica.buffers.values()]
        self.glimpses[done] = _Glimpse(
            now - self.began_s,
            self.engine.ledger.total_bytes,
            None if replica.loss is None else float(replica.loss),
            replica.num_dropped,
            model if rank == 0 else [],
        )

    def _changed(self, rank: int, is_there: bool, why: str) -> None:
        """Somebody came or was lost; the hub says so."""
        if rank >= self.engine.num_workers:
            return
        if is_there and self._is_over and self.rank >= self.engine.num_workers:
            if not self.is_hub:
                text = f"worker {rank} came too late: the others have trained to the end"
                failed = Framed(Failed.of(RefusedError(text)))
                self.transport.send(rank, self.engine.job, tag_hash(ANSWER), failed)
            return
        if not self.is_hub or self.signals.wanted:
            return
        if is_there and not self.is_inside:
            self.agreement.absent.add(rank)
        now = self.engine.now - self.began_s
        if is_there:
            for row in [row for row in self.lost if row["rank"] == rank][-1:]:
                row["back_s"] = now
            self._say(f"worker {rank} is back after {now:.1f} s")
        else:
            self.lost.append({"rank": rank, "time_s": now, "why": why})
            self._say(f"worker {rank} was lost after {now:.1f} s: {why}")

    # The beginning.

    def _begin(self) -> None:
        """All have the same configuration, and know the folder."""
        report = {
            "failure": self.failure,
            "config": "" if self.failure else self.experiment.config.to_toml(),
            "holds": self._holds(),
        }
        decision = self.agreement.agree(report, self._admit)
        if "lost" in decision:
            raise LostError(decision["failure"], decision["lost"])
        if decision["failure"]:
            raise RefusedError(decision["failure"])
        self._prepare(decision["folder"])

    def _prepare(self, folder: str | None) -> None:
        self.plan, self.config = self.experiment.plan, self.experiment.config
        if folder is not None:
            self.folder = Path(folder)
            Record.describe(self.folder, self.config)
            self.checkpoints = Checkpoints(self.folder, self.rank)
        if self.is_hub:
            saves = self.plan.pauses and folder is not None
            self._conductor = Conductor(
                self.experiment, self._record, self._every_s if saves else None, self._progress
            )

    def _holds(self) -> str:
        """What is in the folder, here: on another machine it may be another one."""
        if self.failure or self.where.folder is None or not Record(self.where.folder).exists:
            return ""
        return _THIS if Record(self.where.folder).config == self.experiment.config else _ANOTHER

    def _admit(self, reports: Reports) -> Row:
        """On the hub: may the run begin, and where are its records?"""
        own = reports[self.hub]
        assert own is not None
        for rank, report in enumerate(reports):
            if report is None:
                text = f"{self._name(rank)} was lost before the run began"
                return {"failure": text, "lost": rank}
            if report["failure"]:
                return {"failure": report["failure"]}
            if report["config"] != own["config"]:
                lines = zip(report["config"].splitlines(), own["config"].splitlines())
                other, here = next(pair for pair in lines if pair[0] != pair[1])
                names = self._name(rank), self._name(self.hub)
                return {"failure": f"{names[0]} has {other} where {names[1]} has {here}"}
        folder, config = self.where.folder, self.experiment.config
        goes_on = self.where.resumes or (self.where.is_restart and own["holds"] == _THIS)
        for rank, report in enumerate(reports):
            what = report["holds"] if report is not None else ""
            # Of what is where the hub is, `create` tells.
            is_news = rank != self.hub and (goes_on or not own["holds"])
            if is_news and what and not (goes_on and what == _THIS):
                text = f"{folder} already holds another run where {self._name(rank)} is"
                return {"failure": text}
        try:
            if folder is not None:
                self._record = Record.open(folder) if goes_on else Record.create(folder, config)
        except (ValueError, OSError) as error:
            return {"failure": str(error)}
        return {"failure": "", "folder": None if folder is None else str(folder)}

    def _restore(self) -> None:
        """Goes on from the newest checkpoint of which every rank has its part.

        Where workers do not pause, from what all servers have.
        """
        found = {} if self.checkpoints is None else self.checkpoints.load()
        if not self.plan.pauses:
            found = found if isinstance(self.part, ServerPart) else {}
        first, end = self.config.workers, self.config.workers + self.plan.architecture.num_servers

        def choose(reports: Reports) -> Row:
            some = reports if self.plan.pauses else reports[first:end]
            sets = [set(report["steps"]) for report in some if report is not None]
            common = set.intersection(*sets) if sets else set()
            return {"step": max(common) if common else None}

        step = self.agreement.agree({"steps": sorted(found)}, choose)["step"]
        saved = None if step is None else self._kept(found.get(step))
        if saved is not None:
            if saved["config"] != self.config.to_toml():
                raise ValueError(
                    f"{self.folder}: config.toml is not the configuration this run was started "
                    "with; put it back, or start a new run"
                )
            self.part.restore(saved["part"])
            self.engine.ledger.restore(saved["ledger"])
            self.engine.call_s.update(saved["call_s"])
            self.spent.update(saved["spent"])
            self.metrics = saved["metrics"]
        self._comes_back = step is not None and not self.plan.pauses
        if self._comes_back:
            if isinstance(self.part, ServerPart):
                self.part.server.forget_workers()
            step = 0
        if self.checkpoints is not None and self.plan.pauses and not self._is_told_again:
            self.checkpoints.forget_after(step or 0)
        if self._conductor is not None:
            self._conductor.begin(step or 0, self.metrics)
        self.step = self.at = self.saved_step = step or 0

    def _kept(self, saved: dict[str, Any] | None) -> dict[str, Any] | None:
        """What a server began with, should it be told again what happened since: the checkpoint
        may not be there any more."""
        if self._keep is None:
            return saved
        path = self._keep / "began.pt"
        if path.exists():
            found: dict[str, Any] = torch.load(path, weights_only=True)
            return found
        if saved is not None:
            content = io.BytesIO()
            torch.save(saved, content)
            write_atomically(path, content.getbuffer())
        return saved

    @property
    def _is_told_again(self) -> bool:
        """Whether this is a server that hears what one before it has heard."""
        return bool(getattr(self.transport, "is_told_again", False))

    def _name(self, rank: int) -> str:
        return name_of(rank, self.engine.num_workers, self.engine.size)

    def _come_late(self) -> None:
        """A worker that came when the others had begun."""
        if self.failure:
            raise RefusedError(self.failure)
        self._prepare(None)
        if self.plan.pauses:
            raise RefusedError(
                f"worker {self.rank} came too late: {self.config.synchronization} on "
                f"{self.config.architecture} needs all workers from beginning to end"
            )
        self.part = part_of(self.plan, self.rank)
        self._comes_back = True
        self.engine.num_runs = _RUNS_BEFORE
        self.is_inside = True

    # A server that survives the end of its process.

    def state(self) -> dict[str, Any] | None:
        """All there is of this node in a segment while its program waits; else None."""
        if not self.is_inside or not self.engine.is_at_rest:
            return None
        return {
            "part": self.part.snapshot(),
            "step": self.step,
            "last": self.last,
            "num_runs": self.engine.num_runs,
            "ledger": self.engine.ledger.snapshot(),
            "call_s": dict(self.engine.call_s),
            "spent": dict(self.spent),
            "metrics": self.metrics,
            "folder": None if self.folder is None else str(self.folder),
            "saved_step": self.saved_step,
        }

    def _reenter(self, state: dict[str, Any]) -> None:
        self._prepare(state["folder"])
        self.part = part_of(self.plan, self.rank)
        self.part.restore(state["part"], is_told=True)
        self.step, self.last, self.at = state["step"], state["last"], state["step"]
        self.saved_step = state["saved_step"]
        self.engine.num_runs = state["num_runs"] - 1  # it enters that run again
        self.engine.ledger.restore(state["ledger"])
        self.engine.call_s.update(state["call_s"])
        self.spent.update(state["spent"])
        self.metrics = state["metrics"]
        self.is_inside = True

    # What comes next.

    def _agree(self) -> Row:
        is_last = self.step == self.plan.num_steps
        report = {
            "signal": self.signals.wanted,
            "bytes_sent": self.engine.ledger.total_bytes,
            "training_s": self.spent["training_s"],
            "segment_steps": self.segment_steps,
            "step_s": self.step_s,
            **self.part.report(digests=is_last or self.step % self.config.eval_every == 0),
        }

        def decide(reports: Reports) -> Row:
            assert self._conductor is not None
            return self._conductor.decide(self.step, reports)

        return self.agreement.agree(report, decide)

    def _evaluate(self, decision: Row) -> None:
        """The hub gets what it needs of the others, and evaluates the model."""
        model = self._collected(decision)
        params: dict[int, list[Tensor]] = {}
        if decision["differ"]:
            mine = [self.part.replica.params] if isinstance(self.part, WorkerPart) else []
            params = self.agreement.collect(mine, range(self.config.workers), 1)
        if self._conductor is not None:
            others = [params[rank][0] for rank in sorted(params)]
            self._conductor.evaluate(self.step, decision, model, others)

    def _collected(self, decision: Row) -> list[Tensor]:
        """On the hub: the model, parameters and then statistics; elsewhere nothing."""
        ranks, speaker, own = decision["holders"], decision["speaker"], self.part.model()
        initial = list(self.plan.task.initial_buffers().values())
        if ranks[0] < self.config.workers:
            return self.agreement.collect(own, ranks, 1 + len(initial)).get(ranks[0], [])
        shards = self.agreement.collect(own[:1], ranks, 1)
        statistics: dict[int, list[Tensor]] = {}
        if initial:
            statistics = self.agreement.collect(own[1:], [speaker], len(initial))
        if not self.is_hub:
            return []
        whole = torch.cat([shards[rank][0] for rank in ranks])
        return [whole, *statistics.get(speaker, initial)]

    def _look_back(self, steps: list[str], reports: Reports) -> None:
        """The hub evaluates what rank 0 had on its way."""
        if not steps:
            return
        count = 1 + len(self.plan.task.initial_buffers())
        mine = [x for glimpse in self.glimpses.values() for x in glimpse.model]
        found = self.agreement.collect(mine, [0], count * len(steps)).get(0)
        if self._conductor is not None and found:
            models = {s: found[i * count : (i + 1) * count] for i, s in enumerate(steps)}
            self._conductor.look_back(models, reports)

    # Records.

    def _save(self) -> None:
        assert self.checkpoints is not None
        self.checkpoints.write(self.step, self._saved())
        self.saved_step = self.step

    def _saved(self) -> dict[str, Any]:
        self._count_wall()
        metrics = self.metrics if self._conductor is None else self._conductor.metrics
        return {
            "config": self.config.to_toml(),
            "part": self.part.snapshot(),
            "ledger": self.engine.ledger.snapshot(),
            "call_s": dict(self.engine.call_s),
            "spent": dict(self.spent),
            "metrics": metrics,
        }

    def _save_servers(self) -> None:
        """A signal ends a run that does not pause: what servers have is what is left of it."""
        if self.checkpoints is not None and isinstance(self.part, ServerPart):
            self.part.server.forget_workers()
            self.checkpoints.write(_SERVERS_STATE, self._saved())

    def _count_wall(self) -> None:
        now = time.perf_counter()
        self.spent["wall_s"] += now - self.started_s
        self.started_s = now

    def _finish(self) -> Run:
        self._count_wall()
        report = {
            "ledger": self.engine.ledger.snapshot(),
            "spent": dict(self.spent),
            "call_s": dict(self.engine.call_s),
            **self.part.report(digests=False),
        }

        def sum_up(reports: Reports) -> Row:
            assert self._conductor is not None
            return self._conductor.sum_up(reports, wall_s=self.spent["wall_s"], lost=self.lost)

        decision = self.agreement.agree(report, sum_up)
        ledger = Ledger(self.engine.size)
        ledger.restore(decision["ledger"])
        model = self._collected(decision)
        if self._record is not None:
            assert self._conductor is not None
            self._record.keep_model(*self._conductor.named(model))
            self._record.finish(decision["summary"])
        finish(self.log, self.part)
        own = model or self.part.model() or [torch.empty(0)]
        buffers = dict(zip(self.plan.task.initial_buffers(), own[1:]))
        replicas = [self.part.replica] if isinstance(self.part, WorkerPart) else []
        metrics, summary = decision["metrics"], decision["summary"]
        return Run(self.config, metrics, summary, own[0], buffers, replicas, ledger)

    # The end that nobody wanted.

    def _stopped(self, why: str, lost: int | None) -> LostError:
        if not hasattr(self, "part"):
            return LostError(f"the run did not begin: {why}", lost)
        config = self.config
        message = (
            f"{config.synchronization} on {config.architecture} stopped in step {self.at} of "
            f"{self.plan.num_steps}: {why}. {self._how_to_go_on()}"
        )
        if self._record is not None:
            self._record.finish({"config": asdict(config), "stopped": message, "lost": self.lost})
        return LostError(message, lost)

    def _how_to_go_on(self) -> str:
        if self.folder is None:
            return "It has no folder, so it starts again from the beginning."
        if not self.plan.pauses:
            return f"Go on with what the servers have: gradwire run --resume {self.folder}"
        if self.checkpoints is None or not self.saved_step:
            return f"There is no checkpoint; begin again: gradwire run --resume {self.folder}"
        return f"Go on from step {self.saved_step}: gradwire run --resume {self.folder}"
