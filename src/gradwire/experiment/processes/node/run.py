"""One node of a run on real processes, whatever its role, from the first agreement to the summary.

If the workers pause between steps, a run consists of segments, as on the simulator. Between two
segments the nodes agree (agreement.py) on what comes next. At these points no message is under way,
so the state of a node is complete: a checkpoint holds it, with the number of the next step. The
position in the data and every random draw follow from that number.

If they do not pause (asynchronous methods), a run is one segment. Rank 0 saves snapshots of its
model on disk. They are evaluated at the end, because sending and evaluating them earlier would take
training time. If servers hold the model, workers may be lost and come back meanwhile. After a
signal, workers end between two steps, and servers once they have received all messages from them;
the saved state of the servers is what an interrupted run continues from.

Evaluations, checkpoints and agreements count neither as training time nor in the ledger.
"""

import time
from functools import partial
from typing import Any

import torch

from gradwire.core.errors import LostError, PeerLost, RefusedError
from gradwire.core.node import Framed
from gradwire.core.protocols import Replica
from gradwire.core.wire import ANSWER, Failed
from gradwire.experiment.processes.launch.signals import Interrupted
from gradwire.experiment.processes.node.coordinator import Reports
from gradwire.experiment.processes.node.evaluating import EvaluatingNode
from gradwire.experiment.processes.node.schedule import measure_schedule, regroup_worker
from gradwire.experiment.processes.node.types import StepFigures
from gradwire.experiment.processes.replay import finish_recording, make_recorder, record_order
from gradwire.experiment.processes.state.model_snapshots import ModelSnapshots
from gradwire.experiment.run.machine import why_lost
from gradwire.experiment.run.outcome import Run
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.roles import NodeRole, Segment, ServerRole, WorkerRole, make_role
from gradwire.experiment.run.setup import warm_up
from gradwire.experiment.timeline.store import spans_of, write_spans
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.process.engine import StuckError
from gradwire.runtime.process.frames import tag_hash
from gradwire.training.worker import TrainingWorker

# After a signal, in a run that does not pause: how long a worker may take for its step, and how
# long the other nodes wait until all workers have left.
_STEP_LIMIT_S, _LEAVE_LIMIT_S = 1.0, 3.0


class NodeRun(EvaluatingNode):
    """One node while it runs."""

    def run(self, state: dict[str, Any] | None = None) -> Run:
        """Runs from the start; a restarted server continues from its state in a segment."""
        self.engine.on_change = self._on_membership_change
        try:
            if state is not None:
                self._restore_in_segment(state)
            elif self._incarnation and self.layout.is_worker(self.rank):
                self._join_late()
            else:
                self._agree_to_start()
                self.role: NodeRole = make_role(self.plan, self.rank)
                self._restore()
            if isinstance(self.role, ServerRole):
                self.role.server.on_push = self._on_push
            if self.config.record_order and self.folder is not None:
                self.recorder = make_recorder(
                    self.folder,
                    self.experiment,
                    self.rank,
                    self.step,
                    is_in_segment=self.is_in_segment,
                    say=self.notices.append,
                )
            if self.layout.is_worker(self.rank):
                warm_up(self.plan, self.rank)
            with self.signals.waiting():
                if self.plan.pauses:
                    self._run_segments()
                else:
                    self._run_continuously()
            return self._finish()
        except (PeerLost, StuckError) as error:
            if self.signals.wanted and hasattr(self, "role"):  # the signal is the cause
                raise self._interrupted() from error
            if isinstance(error, PeerLost):
                raise self._stop_error(why_lost(error, self._name), error.rank) from error
            raise self._stop_error(str(error), self.rank) from error

    def _run_segments(self) -> None:
        """Runs segments between agreements, if the workers pause."""
        if self.is_in_segment:
            self._train_segment(self.last)
        while True:
            decision = self._agree()
            # The checkpoint comes before the evaluation, which may take long or fail. A run that
            # is resumed from it repeats the evaluation.
            if decision["checkpoint"]:
                self._save_checkpoints()
            if decision["evaluate"]:
                self._evaluate(decision)
                self._wait_for_all()
            if decision["signal"]:
                raise self._interrupted(decision["signal"])
            if self.step == self.plan.num_steps:
                return
            if decision["drifted"] and self._undecided:
                self._decide_schedule_again()
            self._train_segment(decision["last"])

    def _decide_schedule_again(self) -> None:
        """All ranks measure again, and continue with what they decide then."""
        began_s = time.monotonic()
        role, old = self.role, self.plan
        assert isinstance(role, WorkerRole), "with servers nothing is measured"
        measured = measure_schedule(
            self.experiment, self.engine, self.agreement, recorded=self._undecided
        )
        if measured.plan.scheduling != old.scheduling:
            program = partial(regroup_worker, replica=role.replica, old=old, new=measured.plan)
            replica = self.agreement.run_uncounted(program)
            self._take_schedule(measured)
            assert isinstance(self.role, WorkerRole)
            self.role.replica = replica
            self.schedules.append((self.step, repr(self.plan.scheduling)))
        if self._coordinator is not None:
            self._coordinator.drift.note_decision(time.monotonic() - began_s)
            if measured.plan.scheduling != old.scheduling:
                self._notify(
                    f"steps take another time than before: {self.plan.scheduling!r} from step "
                    f"{self.step} on"
                )

    def _wait_for_all(self) -> None:
        """Waits until all nodes are here, however long that takes."""
        self.agreement.agree({}, lambda reports: {})

    def _save_checkpoints(self) -> None:
        """Saves a checkpoint on all nodes, and removes old ones."""
        began_s = time.monotonic()
        self._save_checkpoint()
        self._wait_for_all()  # now all have their file
        assert self.checkpoints is not None
        if self.is_coordinator:
            self.checkpoints.note_complete()
        self.checkpoints.remove_old()
        if self._coordinator is not None:
            self._coordinator.note_checkpoint(time.monotonic() - began_s)

    def _run_continuously(self) -> None:
        """Runs one segment, if the workers do not pause, and evaluates at its end."""
        self.engine.on_wait = self._poll_while_waiting
        try:
            if not self.is_in_segment:
                # All nodes begin together.
                self.agreement.agree(self._take_notices(), self._show_notices)
            self.agreement.absent.clear()
            self._train_segment(self.plan.num_steps)
            self._is_trained = True
            self._poll_while_waiting()
            self._evaluate_at_end()
        except (Interrupted, PeerLost, LostError, StuckError):
            self._save_server_state()
            raise
        finally:
            self.engine.on_wait = None

    def _poll_while_waiting(self) -> None:
        """The engine calls this while all programs wait, in a run that does not pause."""
        if not self.signals.wanted:
            self._check_scheduler()
            return
        waited_s = time.monotonic() - self.signals.received_s
        if self.layout.is_worker(self.rank):
            must_stop = waited_s > _STEP_LIMIT_S
        else:
            have_left = self.engine.gone.issuperset(self.layout.workers)
            must_stop = waited_s > _LEAVE_LIMIT_S or have_left
        if must_stop:
            raise self._interrupted()

    def _check_scheduler(self) -> None:
        """Stops if the scheduler is gone: without it the result would be lost."""
        scheduler = self.layout.coordinator
        if self.layout.others and scheduler in self.engine.gone:
            raise self._stop_error("the scheduler was lost, or told to stop", scheduler)

    def _interrupted(self, signal: int | None = None) -> Interrupted:
        return Interrupted(signal or self.signals.wanted, self._resume_advice())

    def _evaluate_at_end(self) -> None:
        """Evaluates the snapshots of the one segment, and the final model."""
        figures = {
            "step_figures": {str(step): tuple(own) for step, own in self.step_figures.items()},
            "bytes_at_push": {str(step): count for step, count in self.bytes_at_push.items()},
        }
        reports: Reports = []

        def decide(received: Reports) -> Row:
            nonlocal reports
            reports = received
            workers = received[: self.config.workers]
            known = {row["rank"] for row in self.lost}
            missing = [rank for rank, report in enumerate(workers) if report is None]
            return {
                "steps": [] if workers[0] is None else list(workers[0]["step_figures"]),
                "num_present": sum(report is not None for report in workers),
                # A worker that is missing and was not lost before has left because of the signal.
                "signal": self.signals.wanted if set(missing) - known else 0,
            }

        decision = self.agreement.agree(figures, decide)
        if decision["signal"]:
            raise self._interrupted(decision["signal"])
        if not decision["num_present"]:
            raise self._stop_error("all workers were lost", None)
        self._evaluate_snapshots(decision["steps"], reports)
        self._evaluate(self._agree())

    def _train_segment(self, last: int) -> None:
        """Trains up to the step `last`."""
        engine, transport, spent = self.engine, self.transport, self.spent
        before = engine.compute_s, engine.wait_s, self._num_native_means()
        self.segment_began_s, self.sent_nbytes_before = engine.now, transport.num_bytes_sent
        began = time.perf_counter()
        self.last, self.is_in_segment = last, True
        program = self.role.program(
            Segment(self.step, last, self, self._rejoins, self._incarnation)
        )
        recording = record_order(engine, self.recorder, self.step, last)
        with engine.unread.only(self.role.tags), recording:
            result = engine.run(lambda node: self._wrap(program(node)))
        spent["sent_nbytes"] = self.sent_nbytes
        self.is_in_segment = False
        seconds = time.perf_counter() - began
        if isinstance(self.role, WorkerRole):
            assert isinstance(result, Replica)
            self.role.replica = result
        spent["training_s"] += seconds
        spent["compute_s"] += engine.compute_s - before[0]
        spent["wait_s"] += engine.wait_s - before[1]
        spent["native_means"] += self._num_native_means() - before[2]
        self.segment_steps = last - self.step
        self.step_s = seconds / self.segment_steps
        self.step = self.current_step = last

    # The node observes its worker, and reacts to changes of the membership.

    def worker_started(self, worker: TrainingWorker) -> None:
        pass

    def step_finished(self, rank: int, step: int, replica: Replica, now: float) -> None:
        self.current_step = done = step + 1
        if self.engine.spans is not None:
            self.engine.spans.step_finished(step)
        if self.plan.pauses:
            return
        if self.signals.wanted:
            advice = "The others may continue without this worker."
            raise Interrupted(self.signals.wanted, advice)
        self._check_scheduler()
        if done % self.config.eval_every or done == self.plan.num_steps:
            return
        self.step_figures[done] = StepFigures(
            now - self.segment_began_s,
            self.engine.ledger.total_bytes,
            None if replica.loss is None else float(replica.loss),
            replica.num_dropped,
        )
        if rank == 0:
            if self.model_snapshots is None:
                self.model_snapshots = ModelSnapshots(self.folder)
            model = [self.plan.synchronization.agreed(replica), *replica.buffers.values()]
            self.model_snapshots.save(done, model)

    def _on_push(self, rank: int, step: int) -> None:
        """A server has received a push."""
        done = step + 1
        if rank == 0 and not self.plan.pauses and done % self.config.eval_every == 0:
            count = self.engine.ledger.total_bytes + self.engine.received.total_bytes
            self.bytes_at_push[done] = count

    def _on_membership_change(self, rank: int, is_present: bool, why: str) -> None:
        """A worker joined or was lost. The coordinator notes it and informs the user."""
        if not self.layout.is_worker(rank):
            return
        if is_present and self._is_trained and not self.layout.is_worker(self.rank):
            if not self.is_coordinator:
                text = f"worker {rank} came too late: the others have trained to the end"
                failed = Framed(Failed.of(RefusedError(text)))
                self.transport.send(rank, self.engine.job, tag_hash(ANSWER), failed)
            return
        if not self.is_coordinator or self.signals.wanted:
            return
        if is_present and not self.is_in_segment:
            self.agreement.absent.add(rank)
        now = self.spent["training_s"]
        if self.is_in_segment:
            now += self.engine.now - self.segment_began_s
        if is_present:
            for row in [row for row in self.lost if row["rank"] == rank][-1:]:
                row["back_s"] = now
            self._notify(f"worker {rank} is back at {now:.1f} s")
        else:
            self.lost.append({"rank": rank, "time_s": now, "why": why})
            if self.layout.others:  # otherwise the run ends with an error that names the reason
                self._notify(f"worker {rank} was lost after {now:.1f} s: {why}")

    def _finish(self) -> Run:
        self._add_wall_time()
        report = {
            **self._ledgers(),
            "spent": dict(self.spent),
            "call_s": dict(self.engine.call_s),
            "incarnation": self._incarnation,
            **self.role.report(digests=False),
        }

        def summarize(reports: Reports) -> Row:
            assert self._coordinator is not None
            return self._coordinator.summarize(
                reports,
                wall_s=self.spent["wall_s"],
                lost=self.lost,
                resumed=self.resumed,
                resumed_from_servers=self._rejoins,
                schedules=self.schedules,
            )

        decision = self.agreement.agree(report, summarize)
        ledger = Ledger(self.engine.size)
        ledger.restore(decision["ledger"])
        model = self._collect_model(decision)
        if self._record is not None:
            assert self._coordinator is not None
            self._record.save_model(*self._coordinator.with_names(model))
            self._record.finish(decision["summary"])
        finish_recording(self.recorder, self.role)
        if self.engine.spans is not None and self.folder is not None:
            write_spans(self.folder, spans_of(self.engine.spans, self.layout))
        own = model or self.role.model() or [torch.empty(0)]
        buffers = dict(zip(self.plan.task.initial_buffers(), own[1:]))
        replicas = [self.role.replica] if isinstance(self.role, WorkerRole) else []
        decided = decision["metrics"], decision["summary"]
        layout = self.plan.task.layout
        return Run(self.config, *decided, own[0], buffers, replicas, ledger, layout)
