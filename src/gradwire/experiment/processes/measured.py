"""What was measured on real processes, from the reports of all ranks."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from gradwire.experiment.report.figures import counted, taken_together
from gradwire.experiment.run.outcome import summary_of
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.roles import counter_replicas
from gradwire.experiment.run.setup import Experiment
from gradwire.runtime.ledger import Ledger

_LOST = "of workers that were lost"  # in the ledger, instead of the name of a tensor


def make_summary(
    experiment: Experiment, last: Row, reports: Sequence[Row | None]
) -> tuple[Row, Ledger]:
    """The summary and the ledger, given the last row of metrics and the reports of all ranks.

    The report of a lost worker is None. Its counters are lost with it, and so are those of earlier
    incarnations, but servers have counted what they received. `training_time_s` is that of the
    slowest rank. The times that it consists of are means over the present workers, for
    `steps_timed` gradients each.
    """
    num_workers = experiment.config.workers
    present = [report for report in reports if report is not None]
    workers = [report for report in reports[:num_workers] if report is not None]
    others = [report for report in reports[num_workers:] if report is not None]
    pauses = experiment.plan.pauses

    def spent(name: str, rows: Sequence[Row]) -> list[float]:
        return [row["spent"].get(name, 0.0) for row in rows]

    # If workers may be lost, a late joiner has not trained for the whole time.
    training_s = max(spent("training_s", workers if pauses else present))
    ledger = total_ledger(reports, num_workers)
    lost_nbytes = ledger.tensor_bytes.get(_LOST, 0)  # without their frames
    summary = summary_of(
        experiment,
        last,
        ledger,
        _num_gradients(reports, num_workers, pauses),
        training_time_s=training_s,
        in_step=pauses,
        step_time_s=training_s / experiment.plan.num_steps,
        worker_time_s=sum(spent("training_s", workers)) / len(workers),
        compute_time_s=sum(spent("compute_s", workers)) / len(workers),
        wait_time_s=sum(spent("wait_s", workers)) / len(workers),
        call_time_s=_call_s(workers),
        server_call_time_s=_call_s([report for report in others if _is_server(report)]),
        steps_timed=sum(report["num_gradients"] for report in workers) / len(workers),
        bytes_handed_over=int(sum(spent("sent_nbytes", present))) + lost_nbytes,
        native_means=int(max(spent("native_means", present))),
        threads=torch.get_num_threads(),
        noted={
            **taken_together([report.get("notes", {}) for report in present]),
            **counted(experiment.plan, counter_replicas(workers)),
        },
    )
    return summary, ledger


def total_ledger(reports: Sequence[Row | None], num_workers: int) -> Ledger:
    """What all nodes have sent; what lost workers sent is known from those that received it."""
    ledger = Ledger(len(reports))
    for report in reports:
        if report is not None:
            ledger.add(report["ledger"])
    for rank, report in enumerate(reports):
        if report is None or not _is_server(report):
            continue
        received = report["received"]
        for src in range(num_workers):
            missing = received["link_bytes"][src][rank] - ledger.bytes_to[src][rank]
            if missing > 0:
                ledger.bytes_to[src][rank] += missing
                ledger.messages_to[src][rank] = received["link_messages"][src][rank]
                ledger.tensor_bytes[_LOST] += missing
    return ledger


def _num_gradients(reports: Sequence[Row | None], num_workers: int, pauses: bool) -> int:
    """Of all workers. If they do not pause, servers have counted those of lost workers, too."""
    total = 0
    for rank, report in enumerate(reports[:num_workers]):
        own = 0 if report is None else report["num_gradients"]
        pushed = [] if pauses else [row.get("pushes", {}) for row in reports if row is not None]
        total += max(own, *(pushes.get(str(rank), 0) for pushes in pushed), 0)
    return total


def _is_server(report: Row) -> bool:
    """Whether this is the report of a server that holds a shard of the model."""
    return "pushes" in report


def _call_s(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds of these ranks, by function."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for name, own in row["call_s"].items():
            seconds[name] += own / len(rows)
    return dict(seconds)
