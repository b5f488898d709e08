"""One node of a run on real processes, whatever its role, from the first agreement to the summary.

Where the workers pause between steps a run is a fold over segments, as on the simulator. Between
two of them the nodes agree (agreement.py) on what comes next. At these points nothing is under way,
so the state of a node is all there is: a checkpoint holds it, with the number of the next step.
From that number follow the position in the data and every random draw.

Where they do not pause (asynchronous methods) a run is one segment. Rank 0 keeps the models it had
on its way, on disk, and they are evaluated at the end: sending and evaluating them earlier would
cost time of training. Workers may be lost and come back meanwhile, where
servers hold the model. What is left of an interrupted run is the servers' state: after a signal
workers end between two steps, and servers when they have received everything from them.

Evaluations, checkpoints and agreements do not count as time of training, nor in the ledger.
"""

import time
from typing import Any

import torch
from torch import Tensor

from gradwire.core.errors import LostError, PeerLost, RefusedError
from gradwire.core.node import Framed
from gradwire.core.protocols import Replica
from gradwire.core.wire import ANSWER, Failed
from gradwire.experiment.processes.launch.signals import Interrupted
from gradwire.experiment.processes.node.conductor import Reports
from gradwire.experiment.processes.node.parts import Part, Segment, ServerPart, WorkerPart, part_of
from gradwire.experiment.processes.node.state import NodeState
from gradwire.experiment.processes.node.types import Glimpse
from gradwire.experiment.processes.replay import finish, recorded, recorder
from gradwire.experiment.processes.state.shelf import Shelf
from gradwire.experiment.run.machine import why_lost
from gradwire.experiment.run.outcome import Run
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.setup import warm_up
from gradwire.runtime.ledger import Ledger
from gradwire.runtime.process.engine import StuckError
from gradwire.runtime.process.frames import tag_hash
from gradwire.training.worker import TrainingWorker

_STEP_S, _LEAVE_S = 1.0, 3.0  # after a signal: how long a step may take, and all workers


class NodeRun(NodeState):
    """One node at work."""

    # The run.

    def run(self, state: dict[str, Any] | None = None) -> Run:
        """From the beginning; or, for a server that begins again, from its state in a segment."""
        self.engine.on_change = self._changed
        try:
            if state is not None:
                self._reenter(state)
            elif self._life and self.rank < self.engine.num_workers:
                self._come_late()
            else:
                self._begin()
                self.part: Part = part_of(self.plan, self.rank)
                self._restore()
            if isinstance(self.part, ServerPart):
                self.part.server.on_push = self._pushed
            if self.config.record_order and self.folder is not None:
                self.log = recorder(
                    self.folder,
                    self.experiment,
                    self.rank,
                    self.step,
                    is_inside=self.is_inside,
                    say=self.notices.append,
                )
            if self.rank < self.config.workers:
                warm_up(self.plan, self.rank)
            if self.plan.pauses:
                self._fold()
            else:
                self._whole()
            return self._finish()
        except (PeerLost, StuckError) as error:
            if self.signals.wanted and hasattr(self, "part"):  # that is why
                raise Interrupted(self.signals.wanted, self._how_to_go_on()) from error
            if isinstance(error, PeerLost):
                raise self._stopped(why_lost(error, self._name), error.rank) from error
            raise self._stopped(str(error), self.rank) from error

    def _fold(self) -> None:
        with self.signals.waiting():
            if self.is_inside:
                self._segment(self.last)
            while True:
                decision = self._agree()
                # What was trained is safe before an evaluation, which may take long; one that goes
                # on from here makes up for it.
                if decision["checkpoint"]:
                    self._keep_all()
                if decision["evaluate"]:
                    self._evaluate(decision)
                    self.agreement.agree({}, lambda reports: {})  # however long that takes
                if decision["signal"]:
                    raise Interrupted(decision["signal"], self._how_to_go_on())
                if self.step == self.plan.num_steps:
                    return
                self._segment(decision["last"])

    def _keep_all(self) -> None:
        """A checkpoint, however long that takes on one of them."""
        began_s = time.monotonic()
        self._save()
        self.agreement.agree({}, lambda reports: {})  # all have it
        assert self.checkpoints is not None
        if self.is_hub:
            self.checkpoints.note_complete()
        self.checkpoints.forget_old()
        if self._conductor is not None:
            self._conductor.saved(time.monotonic() - began_s)

    def _whole(self) -> None:
        with self.signals.waiting():
            self.engine.on_wait = self._glance
            try:
                if not self.is_inside:
                    self.agreement.agree(self._noticed(), self._tell)  # all begin together
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
            self._look_for_scheduler()
            return
        waited_s = time.monotonic() - self.signals.told_s
        workers = range(self.engine.num_workers)
        if self.rank in workers:
            is_time = waited_s > _STEP_S
        else:
            is_time = waited_s > _LEAVE_S or self.engine.gone.issuperset(workers)
        if is_time:
            self._stop()

    def _look_for_scheduler(self) -> None:
        """Without the scheduler the result would be lost."""
        if self.hub >= self.engine.num_workers and self.hub in self.engine.gone:
            raise self._stopped("the scheduler was lost, or told to stop", self.hub)

    def _stop(self) -> None:
        raise Interrupted(self.signals.wanted, self._how_to_go_on())

    def _sum_up(self) -> None:
        """Looks back on the one segment, and evaluates what came out."""
        figures = {
            "passed": {str(step): tuple(glimpse) for step, glimpse in self.glimpses.items()},
            "marks": {str(step): mark for step, mark in self.marks.items()},
        }
        reports: Reports = []

        def note(received: Reports) -> Row:
            nonlocal reports
            reports = received
            workers = received[: self.config.workers]
            known = {row["rank"] for row in self.lost}
            missing = [rank for rank, report in enumerate(workers) if report is None]
            return {
                "steps": [] if workers[0] is None else list(workers[0]["passed"]),
                "num_there": sum(report is not None for report in workers),
                # Who is missing and was not lost before has left because of the signal.
                "signal": self.signals.wanted if set(missing) - known else 0,
            }

        decision = self.agreement.agree(figures, note)
        if decision["signal"]:
            raise Interrupted(decision["signal"], self._how_to_go_on())
        if not decision["num_there"]:
            raise self._stopped("all workers were lost", None)
        self._look_back(decision["steps"], reports)
        self._evaluate(self._agree())

    def _segment(self, last: int) -> None:
        """Trains on to a step."""
        engine, transport, spent = self.engine, self.transport, self.spent
        before = engine.compute_s, engine.wait_s, self._num_native()
        self.began_s, self.handed_nbytes = engine.now, transport.num_bytes_sent
        began = time.perf_counter()
        self.last, self.is_inside = last, True
        segment = Segment(self.step, last, self, self._comes_back, self._life)
        program = self.part.program(segment)
        with engine.unread.only(self.part.tags), recorded(engine, self.log, self.step, last):
            result = engine.run(lambda node: self._wrap(program(node)))
        spent["handed_nbytes"] = self.handed_in_all
        self.is_inside = False
        seconds = time.perf_counter() - began
        self.part.took(result)
        spent["training_s"] += seconds
        spent["compute_s"] += engine.compute_s - before[0]
        spent["wait_s"] += engine.wait_s - before[1]
        spent["native_means"] += self._num_native() - before[2]
        self.segment_steps = last - self.step
        self.step_s = seconds / self.segment_steps
        self.step = self.at = last

    def _num_native(self) -> int:
        """Collectives that were left to the transport, whose bytes it does not count."""
        return int(getattr(self.transport, "num_native_means", 0))

    def begins(self, worker: TrainingWorker) -> None:
        pass

    def stepped(self, rank: int, step: int, replica: Replica, now: float) -> None:
        self.at = done = step + 1
        if self.signals.wanted and not self.plan.pauses:
            raise Interrupted(self.signals.wanted, "The others may go on without this worker.")
        if not self.plan.pauses:
            self._look_for_scheduler()
        if self.plan.pauses or done % self.config.eval_every or done == self.plan.num_steps:
            return
        self.glimpses[done] = Glimpse(
            now - self.began_s,
            self.engine.ledger.total_bytes,
            None if replica.loss is None else float(replica.loss),
            replica.num_dropped,
        )
        if rank == 0:
            if self.shelf is None:
                self.shelf = Shelf(self.folder)
            model = [self.plan.synchronization.agreed(replica), *replica.buffers.values()]
            self.shelf.put(done, model)

    def _pushed(self, rank: int, step: int) -> None:
        """A server has received this push."""
        done = step + 1
        if rank == 0 and not self.plan.pauses and done % self.config.eval_every == 0:
            self.marks[done] = self.engine.ledger.total_bytes + self.engine.received.total_bytes

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
        now = self.spent["training_s"]
        if self.is_inside:
            now += self.engine.now - self.began_s
        if is_there:
            for row in [row for row in self.lost if row["rank"] == rank][-1:]:
                row["back_s"] = now
            self._say(f"worker {rank} is back at {now:.1f} s")
        else:
            self.lost.append({"rank": rank, "time_s": now, "why": why})
            if self.hub >= self.engine.num_workers:  # else the run ends, and says why
                self._say(f"worker {rank} was lost after {now:.1f} s: {why}")

    # What the user is to know, whoever noticed it.

    def _noticed(self) -> Row:
        notices, self.notices = self.notices, []
        return {"notices": notices}

    def _tell(self, reports: Reports) -> Row:
        for rank, report in enumerate(reports):
            for text in [] if report is None else report["notices"]:
                self._say(f"{self._name(rank)}: {text}")
        return {}

    # What comes next.

    def _agree(self) -> Row:
        is_last = self.step == self.plan.num_steps
        report = {
            "signal": self.signals.wanted,
            "bytes_sent": self.engine.ledger.total_bytes,
            "training_s": self.spent["training_s"],
            "segment_steps": self.segment_steps,
            "step_s": self.step_s,
            **self._noticed(),
            **self.part.report(digests=is_last or self.step % self.config.eval_every == 0),
        }
        if not self.plan.pauses:
            report |= self._counted()

        def decide(reports: Reports) -> Row:
            assert self._conductor is not None
            self._tell(reports)
            return self._conductor.decide(self.step, reports)

        return self.agreement.agree(report, decide)

    def _evaluate(self, decision: Row) -> None:
        """The hub gets what it needs of the others, and evaluates the model."""
        model = self._collected(decision)
        params: dict[int, list[Tensor]] = {}
        if decision["differ"]:
            mine = [self.part.replica.params] if isinstance(self.part, WorkerPart) else []
            count = 1
            if self.plan.mixes:
                mine += self.part.model()
                count = 2 + len(self.plan.task.initial_buffers())
            params = self.agreement.collect(mine, range(self.config.workers), count)
        if self._conductor is not None:
            workers = [params[rank] for rank in sorted(params)]
            self._conductor.evaluate(self.step, decision, model, workers)

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
        """The hub evaluates what rank 0 had on its way, one after the other."""
        count = 1 + len(self.plan.task.initial_buffers())
        # Its clock began when it came, and what it had before is lost with it.
        came_s = max((row.get("back_s", 0.0) for row in self.lost if row["rank"] == 0), default=0.0)
        for step in steps:
            mine = [] if self.shelf is None else self.shelf.get(int(step))
            model = self.agreement.collect(mine, [0], count).get(0)
            if self._conductor is not None and model:
                self._conductor.look_back(step, model, reports, came_s)

    def _counted(self) -> Row:
        return {"ledger": self.engine.ledger.snapshot(), "heard": self.engine.received.snapshot()}

    def _finish(self) -> Run:
        self._count_wall()
        report = {
            **self._counted(),
            "spent": dict(self.spent),
            "call_s": dict(self.engine.call_s),
            "life": self._life,
            **self.part.report(digests=False),
        }

        def sum_up(reports: Reports) -> Row:
            assert self._conductor is not None
            return self._conductor.sum_up(
                reports,
                wall_s=self.spent["wall_s"],
                lost=self.lost,
                resumed=self.resumed,
                is_rest=self._comes_back,
            )

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
