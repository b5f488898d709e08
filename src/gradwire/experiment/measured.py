"""What was measured on real processes, from the reports of all ranks."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from gradwire.experiment.figures import counted
from gradwire.experiment.outcome import summary_of
from gradwire.experiment.parts import noted, slim
from gradwire.experiment.record import Row
from gradwire.experiment.setup import Experiment
from gradwire.runtime.ledger import Ledger


def summed_up(
    experiment: Experiment, last: Row, reports: Sequence[Row], workers: Sequence[Row]
) -> tuple[Row, Ledger]:
    """The summary and the ledger of all ranks that are there, given the last row of metrics.

    Times are those of the slowest worker, their parts means over the workers.
    """
    ledger = Ledger(experiment.config.workers + experiment.plan.architecture.num_others)
    for report in reports:
        ledger.add(report["ledger"])
    call_s: defaultdict[str, float] = defaultdict(float)
    for report in workers:
        for name, seconds in report["call_s"].items():
            call_s[name] += seconds / len(workers)

    def spent(name: str, rows: Sequence[Row]) -> list[float]:
        return [row["spent"].get(name, 0.0) for row in rows]

    training_s = max(spent("training_s", workers))
    summary = summary_of(
        experiment,
        last,
        ledger,
        sum(report["num_gradients"] for report in workers),
        training_time_s=training_s,
        step_time_s=training_s / experiment.plan.num_steps,
        compute_time_s=sum(spent("compute_s", workers)) / len(workers),
        wait_time_s=sum(spent("wait_s", workers)) / len(workers),
        call_time_s=dict(call_s),
        bytes_handed_over=int(sum(spent("handed_nbytes", reports))),
        threads=torch.get_num_threads(),
        noted={**noted(reports), **counted(slim(list(workers)))},
    )
    return summary, ledger
