"""The state of one node of a run on real processes, whatever its role.

A node starts together with all others, or continues from a checkpoint; a durable server continues
from its own state. It saves checkpoints, and after an unexpected end it reports how to resume the
run. What it does between start and end is in `run.py`.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwire.core.errors import DifferentSettingsError, LostError, RefusedError
from gradwire.core.layout import NodeLayout
from gradwire.experiment.processes.agreement import Agreement
from gradwire.experiment.processes.launch.signals import Signals
from gradwire.experiment.processes.node.admission import Admission, folder_content
from gradwire.experiment.processes.node.coordinator import Coordinator, Reports
from gradwire.experiment.processes.node.schedule import measure_schedule, with_schedule
from gradwire.experiment.processes.node.types import CountingTransport, RunFolder, StepFigures
from gradwire.experiment.processes.resumption import choose_checkpoint, ranks_with_checkpoints
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.experiment.processes.state.model_snapshots import ModelSnapshots
from gradwire.experiment.processes.state.recovery import (
    SERVER_STATE_STEP,
    Damage,
    has_updates,
    initial_checkpoint,
    recover,
    remove_other_stores,
)
from gradwire.experiment.run.config import common_settings
from gradwire.experiment.run.outcome import Progress
from gradwire.experiment.run.record import Record, Row
from gradwire.experiment.run.roles import ServerRole, make_role
from gradwire.experiment.run.setup import Experiment
from gradwire.runtime.interpreter.calls import no_evaluator
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.process.spans import ProcessSpans
from gradwire.runtime.replay.order import Recorder
from gradwire.runtime.spans import SpanLog

_NUM_AGREEMENTS_BEFORE_TRAINING = 3  # in a run that does not pause; each is a run of the engine


class NodeState:
    """One node of a run. `prepared` is the experiment, or the reason why there is none.

    `incarnation` of a late joiner is when it joined. `wrap` is applied to the programs of segments.
    `store_folder` is where a durable server has its state and its journal.
    """

    def __init__(
        self,
        prepared: Experiment | str,
        transport: CountingTransport,
        layout: NodeLayout,
        where: RunFolder,
        *,
        checkpoint_every_s: float,
        timeout_s: float,
        signals: Signals,
        progress: Progress | None = None,
        say: Callable[[str], None] = lambda text: None,
        incarnation: float = 0.0,
        wrap: Callable[[Any], Any] = lambda program: program,
        native: bool = False,
        store_folder: Path | None = None,
        is_started_by_hand: bool = False,
    ) -> None:
        self.rank = transport.rank
        self.layout = layout
        self.transport = transport
        self.signals = signals
        self.where = where
        self.failure = prepared if isinstance(prepared, str) else ""
        if not isinstance(prepared, str):
            self.experiment = prepared
        self.engine = ProcessEngine(
            transport,
            layout.num_workers,
            evaluate=no_evaluator if self.failure else self.experiment.plan.task.gradients,
            evaluate_layers=None if self.failure else self.experiment.plan.task.gradient_by_layer,
            timeout_s=timeout_s,
            native=native,
        )
        if not self.failure and self.experiment.config.record_spans:
            layers = [layer.name for layer in self.experiment.plan.profile.layers]
            log = SpanLog(layout.num_workers, layout.size)
            self.engine.spans = ProcessSpans(self.rank, log, layers)
        pauses = bool(self.failure) or self.experiment.plan.pauses
        may_miss = bool(layout.others) and not pauses
        self.agreement = Agreement(self.engine, layout.coordinator, may_miss)
        self.folder: Path | None = None
        self.checkpoints: Checkpoints | None = None
        self.step = 0  # at which the next segment begins, or the current one began
        self.last = 0  # at which the current segment ends
        self.current_step = 0
        self.is_in_segment = False
        self.saved_step = 0
        self.segment_began_s = 0.0  # on the engine's clock
        self.sent_nbytes_before = 0  # by the transport, before the segment
        self.segment_steps = 0
        self.step_s = 0.0  # mean duration of a step in the last segment
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds, bytes and counts
        self.metrics: list[Row] = []  # as of the checkpoint
        self.step_figures: dict[int, StepFigures] = {}
        # On a server: bytes that it had received and sent when rank 0 pushed such a step.
        self.bytes_at_push: dict[int, int] = {}
        self.model_snapshots: ModelSnapshots | None = None  # on rank 0, after those steps
        self.lost: list[Row] = []
        self.resumed: list[int] = []  # steps from which the run was resumed
        self.started_s = time.perf_counter()
        self.recorder: Recorder | None = None  # of the event order
        self.notices: list[str] = []  # that the coordinator shows to the user
        self._checkpoint_every_s = checkpoint_every_s
        self._progress, self._notify = progress, say
        self._incarnation = incarnation
        self._wrap = wrap
        self._store_folder = store_folder
        self._is_started_by_hand = is_started_by_hand
        self._is_trained = False  # the segment of a run that does not pause has ended
        self._rejoins = False  # whether workers begin with the model that the servers have
        self._coordinator: Coordinator | None = None  # on the coordinator
        self._record: Record | None = None
        self._continues = False  # on the coordinator: whether the run had begun before
        self._undecided = ""  # the schedule, if it was decided by a measurement and may change
        self.schedules: list[tuple[int, str]] = []  # later ones, and the steps where they began

    @property
    def sent_nbytes(self) -> float:
        """Bytes given to the transport in segments."""
        here = self.transport.num_bytes_sent - self.sent_nbytes_before if self.is_in_segment else 0
        return self.spent["sent_nbytes"] + here

    @property
    def is_coordinator(self) -> bool:
        return self.rank == self.layout.coordinator

    # The start.

    def _agree_to_start(self) -> None:
        """Checks that all nodes have the same configuration, and learns the folder."""
        measures = not self.failure and self.experiment.measures_schedule
        decision = self._admit(measures)
        if decision.get("measures"):
            recorded = decision["recorded"]
            self._undecided = self.experiment.config.scheduling
            self.experiment = measure_schedule(
                self.experiment, self.engine, self.agreement, recorded
            )
            if repr(self.experiment.plan.scheduling) == self._undecided:
                self._undecided = ""  # all its numbers were given
            decision = self._admit(measures=False)
        self._prepare(decision["folder"])

    def _admit(self, measures: bool) -> Row:
        """The decision on whether and where the run begins; with `measures`, not yet where."""
        holds = ""
        try:
            if not self.failure:
                holds = folder_content(self.where, self.experiment)
        except (ValueError, OSError) as error:
            self.failure = f"{self._name(self.rank)}: {error}"
        report = {
            "failure": self.failure,
            "config": "" if self.failure else self.experiment.config.to_toml(),
            "holds": holds,
        }
        experiment = None if self.failure else self.experiment
        admission = Admission(experiment, self.where, self.rank, self._name, measures)
        decision = self.agreement.agree(report, admission.decide)
        self._record, self._continues = admission.record, admission.continues
        if "lost" in decision:
            raise LostError(decision["failure"], decision["lost"])
        if "differs" in decision:
            text = decision["differs"].get(str(self.rank), decision["failure"])
            raise DifferentSettingsError(text)
        if decision["failure"]:
            raise RefusedError(decision["failure"])
        return decision

    def _prepare(self, folder: str | None) -> None:
        self.plan, self.config = self.experiment.plan, self.experiment.config
        if folder is not None:
            self.folder = Path(folder)
            Record.describe(self.folder, self.config)
            self.checkpoints = Checkpoints(self.folder, self.rank)
        if self.is_coordinator:
            saves = self.plan.pauses and folder is not None
            every_s = self._checkpoint_every_s if saves else None
            self._coordinator = Coordinator(self.experiment, self._record, every_s, self._progress)

    def _restore(self) -> None:
        """Continues from the newest checkpoint of which every rank has its file.

        If workers do not pause, only servers have checkpoints: their states.
        """
        damage = self._recover()
        found, skipped = ({}, []) if self.checkpoints is None else self.checkpoints.load()
        if not self.plan.pauses:
            found = found if isinstance(self.role, ServerRole) else {}
        report = {
            "steps": sorted(found),
            "skipped": list(dict.fromkeys(damage.skipped + skipped)),
            "lost": damage.lost,
            "has_updates": has_updates(found.get(SERVER_STATE_STEP)),
        }
        decision = self.agreement.agree(report, self._choose_checkpoint)
        for text in decision["notices"] if self.is_coordinator else ():
            self._notify(text)
        if decision["failure"]:
            raise RefusedError(decision["failure"])
        if self._store_folder is not None:
            remove_other_stores(self._store_folder)
        step = decision["step"]
        saved = None if step is None else found.get(step)
        if self._store_folder is not None and step is not None:
            # Its journal may be replayed from here after the checkpoint was removed.
            saved = initial_checkpoint(self._store_folder, saved)
        if saved is not None:
            if common_settings(saved["config"]) != common_settings(self.config.to_toml()):
                raise ValueError(
                    f"{self.folder}: config.toml is not the configuration this run was started "
                    "with; put it back, or start a new run"
                )
            # What servers recover has no schedules, since theirs do not change.
            self.schedules = saved.get("schedules", [])
            self._undecided = saved.get("undecided", "")  # the configuration has the decision
            if self.schedules:
                self._take_schedule(with_schedule(self.experiment, self.schedules[-1][1]))
            self.role.restore(saved["role"])
            if self.plan.pauses:  # else the counters of the workers are lost: all begin at 0
                self.engine.ledger.restore(saved["ledger"])
                self.engine.call_s.update(saved["call_s"])
                self.spent.update(saved["spent"])
                self.metrics = saved["metrics"]
                self.resumed = [*saved["resumed"], saved["step"]]
        self._rejoins = step is not None and not self.plan.pauses
        if self.checkpoints is not None and not self._rejoins and not self._is_recovering:
            self.checkpoints.remove_after(step)
        if self._rejoins:
            if isinstance(self.role, ServerRole):
                self.role.server.forget_workers()
                self.role.server.forget_figures()
            step = 0
        if self._coordinator is not None:
            if self._record is not None and (changed := self._record.changed_metrics(self.metrics)):
                self._notify(changed)
            self._coordinator.begin(step or 0, self.metrics)
        self.step = self.current_step = self.saved_step = step or 0

    def _take_schedule(self, experiment: Experiment) -> None:
        """Continues with a schedule that differs from the one the run began with.

        The configuration stays, since it is that of the record.
        """
        self.experiment = replace(experiment, config=self.config)
        self.plan = experiment.plan
        self.role = make_role(self.plan, self.rank)
        if self._coordinator is not None:
            self._coordinator.experiment, self._coordinator.plan = self.experiment, self.plan

    def _choose_checkpoint(self, reports: Reports) -> Row:
        """On the coordinator: from which checkpoint the run continues."""
        return choose_checkpoint(
            reports,
            ranks_with_checkpoints(self.plan),
            self._name,
            folder=self.folder,
            is_resumed=self._continues,
            had_complete=self.checkpoints is not None and self.checkpoints.had_complete,
            may_restart=self.where.may_restart,
        )

    def _recover(self) -> Damage:
        """A server recovers its state from a job that ended without a checkpoint.

        Its stores are kept until all nodes know from which checkpoint they continue.
        """
        if self._store_folder is None or self.checkpoints is None or self._is_recovering:
            return Damage([], [])
        if self.plan.pauses or not isinstance(self.role, ServerRole):
            return Damage([], [])
        return recover(self.experiment, self._store_folder, self.checkpoints)

    @property
    def _is_recovering(self) -> bool:
        """Whether this is a server that replays the journal of its former process."""
        return bool(getattr(self.transport, "is_recovering", False))

    def _name(self, rank: int) -> str:
        return self.layout.name_of(rank)

    def _join_late(self) -> None:
        """Prepares a worker that joins after the others have begun."""
        if self.failure:
            raise RefusedError(self.failure)
        self._prepare(None)
        if self.plan.pauses:
            raise RefusedError(
                f"worker {self.rank} came too late: {self.config.synchronization} on "
                f"{self.config.architecture} needs all workers from beginning to end"
            )
        self.role = make_role(self.plan, self.rank)
        self._rejoins = True
        self.engine.num_runs = _NUM_AGREEMENTS_BEFORE_TRAINING
        self.is_in_segment = True

    # Checkpoints.

    def _save_checkpoint(self) -> None:
        assert self.checkpoints is not None
        self.checkpoints.write(self.step, self._checkpoint_state())
        self.saved_step = self.step

    def _checkpoint_state(self) -> dict[str, Any]:
        self._add_wall_time()
        metrics = self.metrics if self._coordinator is None else self._coordinator.metrics
        return {
            "config": self.config.to_toml(),
            "role": self.role.snapshot(),
            "ledger": self.engine.ledger.snapshot(),
            "call_s": dict(self.engine.call_s),
            "spent": dict(self.spent),
            "metrics": metrics,
            "step": self.step,
            "resumed": self.resumed,
            "schedules": self.schedules,
            "undecided": self._undecided,
        }

    def _add_wall_time(self) -> None:
        now = time.perf_counter()
        self.spent["wall_s"] += now - self.started_s
        self.started_s = now

    # An unexpected end.

    def _stop_error(self, why: str, lost: int | None) -> LostError:
        """The error of a run that cannot continue; it is in the record, too."""
        if not hasattr(self, "role"):
            return LostError(f"the run did not begin: {why}", lost)
        config, where = self.config, ""
        if self.plan.pauses or self.layout.is_worker(self.rank):  # else it knows no step
            where = f" in step {self.current_step} of {self.plan.num_steps}"
        message = (
            f"{config.synchronization} on {config.architecture} stopped{where}: {why}. "
            f"{self._resume_advice()}"
        )
        error = LostError(message, lost)
        if self._record is not None:
            self._record.finish_stopped(error, config, self.lost)
        return error

    def _resume_advice(self) -> str:
        """How the user can resume the run."""
        if self.folder is None:
            return "It has no folder, so it starts again from the beginning."
        command = f"gradwire run --resume {self.folder}"
        if self._is_started_by_hand:
            command = f"start all nodes again, scheduler and servers with --resume {self.folder}"
        if not self.plan.pauses:
            if self.plan.ability == "push_pull":
                return f"Resume from the state of the servers: {command}"
            return f"It does not pause, so there is no checkpoint; begin again: {command}"
        if self.checkpoints is None or not self.saved_step:
            return f"There is no checkpoint; begin again: {command}"
        return f"Resume from step {self.saved_step}: {command}"

    def _num_native_means(self) -> int:
        """Collectives that the transport ran itself; it does not count their bytes."""
        return int(getattr(self.transport, "num_native_means", 0))
