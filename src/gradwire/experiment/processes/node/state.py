"""What one node of a run on real processes is and keeps, whatever its role.

A node begins together with all others, or continues from a checkpoint; a durable server continues
from its own state. It saves checkpoints, and after an unexpected end it says how to continue. What
it does between beginning and end is in `run.py`.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.core.errors import DifferentSettingsError, LostError, RefusedError
from gradwire.experiment.processes.agreement import Agreement
from gradwire.experiment.processes.launch.signals import Signals
from gradwire.experiment.processes.node.admission import Admission, folder_content
from gradwire.experiment.processes.node.conductor import Conductor, Reports
from gradwire.experiment.processes.node.parts import ServerPart, part_of
from gradwire.experiment.processes.node.types import Counting, Glimpse, Where
from gradwire.experiment.processes.resumption import checkpointed, choose
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.experiment.processes.state.recovery import (
    SERVERS_STATE,
    Recovered,
    began_with,
    heard,
    is_evidence,
    recover,
    remove_others,
)
from gradwire.experiment.processes.state.shelf import Shelf
from gradwire.experiment.run.config import common_settings
from gradwire.experiment.run.machine import name_of
from gradwire.experiment.run.outcome import Progress
from gradwire.experiment.run.record import Record, Row
from gradwire.experiment.run.setup import Experiment
from gradwire.runtime.interpreter.calls import no_evaluator
from gradwire.runtime.process.engine import ProcessEngine
from gradwire.runtime.replay.order import Recorder

_RUNS_BEFORE = 3  # of the engine, before the one segment of a run that does not pause


class NodeState:
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
        is_by_hand: bool = False,  # somebody starts each node
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
        self.handed_nbytes = 0  # to the transport, before it
        self.segment_steps = 0
        self.step_s = 0.0  # of one step in the last segment
        self.spent: defaultdict[str, float] = defaultdict(float)  # seconds, and bytes
        self.metrics: list[Row] = []  # as of the checkpoint
        self.glimpses: dict[int, Glimpse] = {}
        # On a server: bytes that it was sent and sent when rank 0 pushed such a step.
        self.marks: dict[int, int] = {}
        self.shelf: Shelf | None = None  # for the models of those steps, on rank 0
        self.lost: list[Row] = []
        self.resumed: list[int] = []  # steps from which the run went on
        self.started_s = time.perf_counter()
        self.log: Recorder | None = None  # of the order in which things happen
        self.notices: list[str] = []  # that the hub is to show to the user
        self._every_s = checkpoint_every_s
        self._progress, self._say = progress, say
        self._life = life
        self._wrap = wrap
        self._keep = keep
        self._is_by_hand = is_by_hand
        self._is_over = False  # the one segment of a run that does not pause
        self._comes_back = False  # whether workers begin with what the servers have
        self._conductor: Conductor | None = None  # on the hub
        self._record: Record | None = None
        self._goes_on = False  # on the hub: whether this is a run that had begun before

    @property
    def handed_in_all(self) -> float:
        """Bytes given to the transport in segments."""
        here = self.transport.num_bytes_sent - self.handed_nbytes if self.is_inside else 0
        return self.spent["handed_nbytes"] + here

    @property
    def is_hub(self) -> bool:
        return self.rank == self.hub

    # The beginning.

    def _begin(self) -> None:
        """All have the same configuration, and know the folder."""
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
        admission = Admission(experiment, self.where, self.rank, self._name)
        decision = self.agreement.agree(report, admission.decide)
        self._record, self._goes_on = admission.record, admission.continues
        if "lost" in decision:
            raise LostError(decision["failure"], decision["lost"])
        if "differs" in decision:
            text = decision["differs"].get(str(self.rank), decision["failure"])
            raise DifferentSettingsError(text)
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

    def _restore(self) -> None:
        """Goes on from the newest checkpoint of which every rank has its part.

        Where workers do not pause, from what all servers have.
        """
        recovered = self._recover()
        found, skipped = ({}, []) if self.checkpoints is None else self.checkpoints.load()
        if not self.plan.pauses:
            found = found if isinstance(self.part, ServerPart) else {}
        report = {
            "steps": sorted(found),
            "skipped": list(dict.fromkeys(recovered.skipped + skipped)),
            "lost": recovered.lost,
            "is_evidence": is_evidence(found.get(SERVERS_STATE)),
        }
        decision = self.agreement.agree(report, self._choose)
        for text in decision["notices"] if self.is_hub else ():
            self._say(text)
        if decision["failure"]:
            raise RefusedError(decision["failure"])
        if self._keep is not None:
            remove_others(self._keep)
        step = decision["step"]
        saved = None if step is None else found.get(step)
        if self._keep is not None and step is not None:
            # Its journal may be replayed from here when the checkpoint is not there any more.
            saved = began_with(self._keep, saved)
        if saved is not None:
            if common_settings(saved["config"]) != common_settings(self.config.to_toml()):
                raise ValueError(
                    f"{self.folder}: config.toml is not the configuration this run was started "
                    "with; put it back, or start a new run"
                )
            self.part.restore(saved["part"])
            if self.plan.pauses:  # else nobody has what workers counted: all begin to count anew
                self.engine.ledger.restore(saved["ledger"])
                self.engine.call_s.update(saved["call_s"])
                self.spent.update(saved["spent"])
                self.metrics = saved["metrics"]
                self.resumed = [*saved["resumed"], saved["step"]]
        self._comes_back = step is not None and not self.plan.pauses
        if self.checkpoints is not None and not self._comes_back and not self._is_recovering:
            self.checkpoints.forget_after(step)
        if self._comes_back:
            if isinstance(self.part, ServerPart):
                self.part.server.forget_workers()
                self.part.server.forget_figures()
            step = 0
        if self._conductor is not None:
            if self._record is not None and (changed := self._record.changed_metrics(self.metrics)):
                self._say(changed)
            self._conductor.begin(step or 0, self.metrics)
        self.step = self.at = self.saved_step = step or 0

    def _choose(self, reports: Reports) -> Row:
        """On the hub: from where the run goes on."""
        return choose(
            reports,
            checkpointed(self.plan, self.engine.size),
            self._name,
            folder=self.folder,
            is_resumed=self._goes_on,
            had_complete=self.checkpoints is not None and self.checkpoints.had_complete,
            may_restart=self.where.may_restart,
        )

    def _recover(self) -> Recovered:
        """A server finds what it had in a job that ended without a checkpoint.

        Its stores stay until all know from where they go on.
        """
        if self._keep is None or self.checkpoints is None or self._is_recovering:
            return Recovered([], [])
        if self.plan.pauses or not isinstance(self.part, ServerPart):
            return Recovered([], [])
        return recover(self.experiment, self._keep, self.checkpoints)

    @property
    def _is_recovering(self) -> bool:
        """Whether this is a server that replays the journal of its former process."""
        return bool(getattr(self.transport, "is_recovering", False))

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
            "heard": self.engine.received.snapshot(),
            "marks": self.marks,
            "call_s": dict(self.engine.call_s),
            "spent": {**self.spent, "handed_nbytes": self.handed_in_all},
            "metrics": self.metrics,
            "folder": None if self.folder is None else str(self.folder),
            "saved_step": self.saved_step,
        }

    def _reenter(self, state: dict[str, Any]) -> None:
        self._prepare(state["folder"])
        self.part = part_of(self.plan, self.rank)
        self.part.restore(state["part"], is_replayed=True)
        self.step, self.last, self.at = state["step"], state["last"], state["step"]
        self.saved_step = state["saved_step"]
        self.engine.num_runs = state["num_runs"] - 1  # it enters that run again
        self.engine.ledger.restore(state["ledger"])
        self.engine.received.restore(state["heard"])
        self.marks = state["marks"]
        self.engine.call_s.update(state["call_s"])
        self.spent.update(state["spent"])
        self.metrics = state["metrics"]
        self.is_inside = True

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
            "step": self.step,
            "resumed": self.resumed,
        }

    def _save_servers(self) -> None:
        """A signal ends a run that does not pause: what servers have is what is left of it."""
        if self.checkpoints is not None and isinstance(self.part, ServerPart):
            self.part.server.forget_workers()
            num_handed = getattr(self.transport, "num_handed", 0)
            own = heard(self._keep, num_handed, is_rest=self._comes_back)
            self.checkpoints.write(SERVERS_STATE, {**self._saved(), **own})

    def _count_wall(self) -> None:
        now = time.perf_counter()
        self.spent["wall_s"] += now - self.started_s
        self.started_s = now

    # The end that nobody wanted.

    def _stopped(self, why: str, lost: int | None) -> LostError:
        if not hasattr(self, "part"):
            return LostError(f"the run did not begin: {why}", lost)
        config, where = self.config, ""
        if self.plan.pauses or self.rank < self.engine.num_workers:  # else it knows no step
            where = f" in step {self.at} of {self.plan.num_steps}"
        message = (
            f"{config.synchronization} on {config.architecture} stopped{where}: {why}. "
            f"{self._how_to_go_on()}"
        )
        error = LostError(message, lost)
        if self._record is not None:
            self._record.finish_stopped(error, config, self.lost)
        return error

    def _how_to_go_on(self) -> str:
        if self.folder is None:
            return "It has no folder, so it starts again from the beginning."
        command = f"gradwire run --resume {self.folder}"
        if self._is_by_hand:
            command = f"start all nodes again, scheduler and servers with --resume {self.folder}"
        if not self.plan.pauses:
            if self.plan.ability == "push_pull":
                return f"Go on with what the servers have: {command}"
            return f"It does not pause, so there is no checkpoint; begin again: {command}"
        if self.checkpoints is None or not self.saved_step:
            return f"There is no checkpoint; begin again: {command}"
        return f"Go on from step {self.saved_step}: {command}"
