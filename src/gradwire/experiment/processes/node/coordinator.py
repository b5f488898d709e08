"""The coordinator of a run on real processes decides what comes next, and keeps the record.

All nodes report to it (`run/roles.py`). It decides whether an evaluation, a checkpoint, the end
because of a signal, or a segment comes next, and how many steps the segment has: it should take
about a second. The report of a worker that is lost is None.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradwire.experiment.processes.measured import make_summary, total_ledger
from gradwire.experiment.processes.node.drift import Drift
from gradwire.experiment.processes.node.types import StepFigures
from gradwire.experiment.report.figures import distance_of, number
from gradwire.experiment.run.outcome import Progress, metrics_row
from gradwire.experiment.run.record import Record, Row
from gradwire.experiment.run.roles import holders
from gradwire.experiment.run.setup import Experiment

_SEGMENT_S = 1.0  # intended duration of a segment: a signal is answered after at most one
_MAX_GROWTH = 8  # a segment is at most this many times as long as the one before
_CHECKPOINT_SPACING = 10  # between checkpoints: at least this many times the duration of the last

Reports = Sequence[Row | None]  # in the order of the ranks, workers first


class Coordinator:
    """Decides, evaluates models and keeps the rows of metrics."""

    def __init__(
        self,
        experiment: Experiment,
        record: Record | None,
        checkpoint_every_s: float | None,  # None: there are no checkpoints
        progress: Progress | None,
    ) -> None:
        self.experiment = experiment
        self.plan, self.config = experiment.plan, experiment.config
        self.record = record
        self.metrics: list[Row] = []
        self._checkpoint_every_s = checkpoint_every_s
        self._progress = progress
        self._saved_step = 0  # of the last checkpoint, perhaps under way
        self._saved_s = time.monotonic()  # when the last one was finished
        self._save_s = 0.0  # its duration
        self.drift = Drift()

    def begin(self, step: int, metrics: list[Row]) -> None:
        """Begins at a step, with the rows of earlier steps. A checkpoint is written before the
        evaluation of its step, so that evaluation may still be missing."""
        self.metrics, self._saved_step = metrics, step
        if self.record is not None:
            self.record.rewind(metrics)

    def decide(self, step: int, reports: Reports) -> Row:
        """What comes next, when all workers are at this step."""
        every, num_steps = self.config.eval_every, self.plan.num_steps
        present = [report for report in reports if report is not None]
        has_row = bool(self.metrics) and self.metrics[-1]["step"] == step
        evaluates = step > 0 and not has_row and (step % every == 0 or step == num_steps)
        signal = max(report["signal"] for report in present)
        saves = False
        if self._checkpoint_every_s is not None and step > self._saved_step:
            wait_s = max(self._checkpoint_every_s, _CHECKPOINT_SPACING * self._save_s)
            is_due = time.monotonic() - self._saved_s >= wait_s
            saves = evaluates or is_due or bool(signal)
        if saves:
            self._saved_step = step
        workers = self._workers(reports)
        last = min(step + _segment_length(workers), (step // every + 1) * every, num_steps)
        slowest_s, segment_steps = (
            max(report[name] for report in workers) for name in ("step_s", "segment_steps")
        )
        decision: Row = {
            "signal": 0 if step == num_steps else signal,
            "evaluate": evaluates,
            "checkpoint": saves,
            "last": last,
            "drifted": self.drift.note(slowest_s, segment_steps) and step < num_steps,
        }
        if evaluates:
            num_bytes, timed = sum(report["bytes_sent"] for report in present), workers
            if not self.plan.pauses:  # with lost workers, and until the last worker was done
                num_bytes = total_ledger(reports, self.config.workers).total_bytes
                timed = present
            decision |= {
                **self._model_location(reports),
                "differ": len({report["digest"] for report in workers}) > 1,
                "losses": [report["loss"] for report in workers if report["loss"] is not None],
                "bytes_sent": num_bytes,
                "time_s": max(report["training_s"] for report in timed),
                "dropped_steps": max(report["num_dropped"] for report in workers),
            }
        return decision

    def note_checkpoint(self, seconds: float) -> None:
        """All nodes have finished a checkpoint, which took so long."""
        self._saved_s, self._save_s = time.monotonic(), seconds

    def evaluate(
        self,
        step: int,
        decision: Row,
        model: Sequence[Tensor],
        workers: Sequence[Sequence[Tensor]],
    ) -> None:
        """Evaluates a model (parameters, then statistics).

        `workers`: if they differ, the parameters of each worker. Under gossip the worker's own
        model follows them, and these models are evaluated.
        """
        own = [self.with_names(tensors[1:]) for tensors in workers if len(tensors) > 1]
        if self.plan.mixes and not own:
            own = [self.with_names(model)] * self.plan.num_workers  # they are all the same
        row = metrics_row(
            self.experiment,
            step,
            own or [self.with_names(model)],
            decision["losses"],
            time_s=decision["time_s"],
            bytes_sent=decision["bytes_sent"],
            distance=number(distance_of([tensors[0] for tensors in workers]) if workers else 0.0),
            dropped_steps=decision["dropped_steps"],
        )
        self._add_row(row)

    def evaluate_snapshot(
        self, step: str, model: Sequence[Tensor], reports: Reports, joined_s: float
    ) -> None:
        """Evaluates a snapshot of the model of rank 0, which joined at that time.

        Losses are those of the same step, of all workers that finished it. Bytes are those that
        servers had received and sent when that push arrived; without servers, those that the
        workers had sent.
        """
        present = [report for report in reports if report is not None]
        of_workers = [report["step_figures"].get(step) for report in present]
        of_servers = [report["bytes_at_push"].get(step) for report in present]
        figures = [StepFigures(*own) for own in of_workers if own is not None]
        pushed = [num_bytes for num_bytes in of_servers if num_bytes is not None]
        assert reports[0] is not None
        row = metrics_row(
            self.experiment,
            int(step),
            [self.with_names(model)],
            [own.loss for own in figures if own.loss is not None],
            time_s=joined_s + StepFigures(*reports[0]["step_figures"][step]).time_s,
            bytes_sent=sum(pushed or [own.num_bytes for own in figures]),
            distance=None,  # the other workers' models of that step are not known
            dropped_steps=max(own.num_dropped for own in figures),
        )
        self._add_row(row)

    def with_names(self, model: Sequence[Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """A model as parameters, and statistics by name."""
        return model[0], dict(zip(self.plan.task.initial_buffers(), model[1:]))

    def summarize(
        self,
        reports: Reports,
        *,
        wall_s: float,
        lost: Sequence[Row],
        resumed: Sequence[int] = (),
        resumed_from_servers: bool = False,
        schedules: Sequence[tuple[int, str]] = (),
    ) -> Row:
        """The summary, and what else all nodes need at the end.

        `resumed`: steps of the checkpoints from which the run was resumed. `resumed_from_servers`:
        it continued from the state of the servers, and figures are those since then. `schedules`:
        those that were decided on later, and from which step on they held.
        """
        summary, ledger = make_summary(self.experiment, self.metrics[-1], reports)
        first = self.config.workers
        summary |= {
            "lost": list(lost),
            "servers_restarted": [
                number
                for number, report in enumerate(reports[first:-1])
                if report is not None and report["incarnation"]
            ],
            "wall_time_s": wall_s,
            "resumed": list(resumed),
            "resumed_from_servers": resumed_from_servers,
            "schedules": [list(one) for one in schedules],
        }
        if resumed_from_servers or lost:  # not all workers took all steps
            steps = max(1, summary["gradients"])
            summary["bytes_per_worker_step"] = summary["bytes_sent"] / steps
            summary["step_time_s"] = summary["training_time_s"] * self.config.workers / steps
        return {
            **self._model_location(reports),
            "summary": summary,
            "ledger": ledger.snapshot(),
            "metrics": self.metrics,
        }

    def _workers(self, reports: Reports) -> list[Row]:
        return [report for report in reports[: self.config.workers] if report is not None]

    def _model_location(self, reports: Reports) -> Row:
        """The ranks that hold the model, and the worker whose statistics are evaluated."""
        return {
            "holders": list(holders(self.plan, self._workers(reports))),
            "statistics_rank": next(rank for rank, one in enumerate(reports) if one is not None),
        }

    def _add_row(self, row: Row) -> None:
        self.metrics.append(row)
        if self.record is not None:
            self.record.append(row, None)
        if self._progress is not None:
            self._progress(row, self.plan.num_steps)


def _segment_length(workers: Sequence[Any]) -> int:
    """Steps of the next segment, given the number and the duration of those of the last one."""
    steps, seconds = workers[0]["segment_steps"], max(report["step_s"] for report in workers)
    length = max(1, round(_SEGMENT_S / seconds)) if seconds else 1
    return int(min(length, max(1, _MAX_GROWTH * steps)))
