"""What the node that keeps the record of a run on real processes decides and writes down.

Everyone reports to it (see parts.py), and it says what comes next: an evaluation, a checkpoint, the
end because somebody got a signal, or a segment of so many steps that it takes about a second. A
report is None if its worker is lost.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradwire.experiment.processes.measured import ledger_of, summed_up
from gradwire.experiment.processes.node.parts import holders
from gradwire.experiment.report.figures import distance_of, number
from gradwire.experiment.run.outcome import Progress, metrics_row
from gradwire.experiment.run.record import Record, Row
from gradwire.experiment.run.setup import Experiment

_SEGMENT_S = 1.0  # how long a segment should take: so soon a signal is answered
_GROWTH = 8  # so many times as long as the one before a segment is at most
_SPACING = 10  # so many times as long as a checkpoint took the time to the next one is at least

Reports = Sequence[Row | None]  # in the order of the ranks, workers first


class Conductor:
    """Keeps the rows of metrics."""

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
        self._save_s = 0.0  # how long it took

    def begin(self, step: int, metrics: list[Row]) -> None:
        """From a step on, with the rows before it: its own is still to be evaluated if it has one,
        as a checkpoint is written before that."""
        self.metrics, self._saved_step = metrics, step
        if self.record is not None:
            self.record.rewind(metrics)

    def decide(self, step: int, reports: Reports) -> Row:
        """What comes next, when all workers stand at this step."""
        every, num_steps = self.config.eval_every, self.plan.num_steps
        there = [report for report in reports if report is not None]
        has_row = bool(self.metrics) and self.metrics[-1]["step"] == step
        evaluates = step > 0 and not has_row and (step % every == 0 or step == num_steps)
        signal = max(report["signal"] for report in there)
        saves = False
        if self._checkpoint_every_s is not None and step > self._saved_step:
            wait_s = max(self._checkpoint_every_s, _SPACING * self._save_s)
            is_due = time.monotonic() - self._saved_s >= wait_s
            saves = evaluates or is_due or bool(signal)
        if saves:
            self._saved_step = step
        workers = self._workers(reports)
        last = min(step + _length(workers), (step // every + 1) * every, num_steps)
        decision: Row = {
            "signal": 0 if step == num_steps else signal,
            "evaluate": evaluates,
            "checkpoint": saves,
            "last": last,
        }
        if evaluates:
            num_bytes, timed = sum(report["bytes_sent"] for report in there), workers
            if not self.plan.pauses:  # with those that were lost, and until the last one was done
                num_bytes = ledger_of(reports, self.config.workers).total_bytes
                timed = there
            decision |= {
                **self._where(reports),
                "differ": len({report["digest"] for report in workers}) > 1,
                "losses": [report["loss"] for report in workers if report["loss"] is not None],
                "bytes_sent": num_bytes,
                "time_s": max(report["training_s"] for report in timed),
                "dropped_steps": max(report["num_dropped"] for report in workers),
            }
        return decision

    def saved(self, seconds: float) -> None:
        """All have finished a checkpoint, which took so long."""
        self._saved_s, self._save_s = time.monotonic(), seconds

    def evaluate(
        self,
        step: int,
        decision: Row,
        model: Sequence[Tensor],
        workers: Sequence[Sequence[Tensor]],
    ) -> None:
        """Evaluates a model (parameters, then statistics).

        `workers`: where they differ the parameters of each worker, which under gossip are followed
        by the model of its own, which is evaluated then.
        """
        own = [self.named(tensors[1:]) for tensors in workers if len(tensors) > 1]
        if self.plan.mixes and not own:
            own = [self.named(model)] * self.plan.num_workers  # they are all the same
        row = metrics_row(
            self.experiment,
            step,
            own or [self.named(model)],
            decision["losses"],
            time_s=decision["time_s"],
            bytes_sent=decision["bytes_sent"],
            distance=number(distance_of([tensors[0] for tensors in workers]) if workers else 0.0),
            dropped_steps=decision["dropped_steps"],
        )
        self._note(row)

    def look_back(
        self, step: str, model: Sequence[Tensor], reports: Reports, came_s: float
    ) -> None:
        """Evaluates a model that rank 0, which came then, had on its way.

        Losses are of the same step, with all workers that passed it. Bytes are what servers had
        received and sent when that push arrived; without servers, what the workers had sent.
        """
        there = [report for report in reports if report is not None]
        passed = [report["passed"][step] for report in there if step in report["passed"]]
        marks = [report["marks"][step] for report in there if step in report["marks"]]
        assert reports[0] is not None
        row = metrics_row(
            self.experiment,
            int(step),
            [self.named(model)],
            [loss for _, _, loss, _ in passed if loss is not None],
            time_s=came_s + reports[0]["passed"][step][0],
            bytes_sent=sum(marks) if marks else sum(num_bytes for _, num_bytes, _, _ in passed),
            distance=None,  # nobody else's model of that step is known
            dropped_steps=max(dropped for _, _, _, dropped in passed),
        )
        self._note(row)

    def named(self, model: Sequence[Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Parameters and statistics, these by name."""
        return model[0], dict(zip(self.plan.task.initial_buffers(), model[1:]))

    def sum_up(
        self,
        reports: Reports,
        *,
        wall_s: float,
        lost: Sequence[Row],
        resumed: Sequence[int] = (),
        is_rest: bool = False,
    ) -> Row:
        """The summary and what else all nodes are to know.

        `resumed`: steps from which the run went on, after a checkpoint. `is_rest`: it goes on from
        what servers had, and figures are those since then.
        """
        summary, ledger = summed_up(self.experiment, self.metrics[-1], reports)
        first = self.config.workers
        summary |= {
            "lost": list(lost),
            "servers_begun_again": [
                number
                for number, report in enumerate(reports[first:-1])
                if report is not None and report["life"]
            ],
            "wall_time_s": wall_s,
            "resumed": list(resumed),
            "is_rest": is_rest,
        }
        if is_rest or lost:  # not all workers took all steps
            steps = max(1, summary["gradients"])
            summary["bytes_per_worker_step"] = summary["bytes_sent"] / steps
            summary["step_time_s"] = summary["training_time_s"] * self.config.workers / steps
        return {
            **self._where(reports),
            "summary": summary,
            "ledger": ledger.snapshot(),
            "metrics": self.metrics,
        }

    def _workers(self, reports: Reports) -> list[Row]:
        return [report for report in reports[: self.config.workers] if report is not None]

    def _where(self, reports: Reports) -> Row:
        """Who holds the model, and the worker whose statistics count."""
        speaker = next(rank for rank, report in enumerate(reports) if report is not None)
        return {"holders": holders(self.plan, self._workers(reports)), "speaker": speaker}

    def _note(self, row: Row) -> None:
        self.metrics.append(row)
        if self.record is not None:
            self.record.append(row, None)
        if self._progress is not None:
            self._progress(row, self.plan.num_steps)


def _length(workers: Sequence[Any]) -> int:
    """Steps of the next segment, given how many the last one had and what one of them took."""
    steps, seconds = workers[0]["segment_steps"], max(report["step_s"] for report in workers)
    length = max(1, round(_SEGMENT_S / seconds)) if seconds else 1
    return int(min(length, max(1, _GROWTH * steps)))
