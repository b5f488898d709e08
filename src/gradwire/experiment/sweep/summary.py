"""Results of a sweep without seeds: means, standard deviations, and ratios to fp32."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from gradwire.experiment.report.score import score_name, score_value
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.record import Row
from gradwire.experiment.studies.compare import FP16, FP32
from gradwire.experiment.sweep.plan import PlannedRun, varied_settings


def summarize(planned: Sequence[PlannedRun], rows: Mapping[PlannedRun, Row]) -> list[Row]:
    """A row for all seeds of one method with one choice of settings, in the order of the plan."""
    varied = varied_settings(planned)
    groups: dict[Config, list[PlannedRun]] = {}
    for run in planned:
        if run in rows:
            groups.setdefault(replace(run.config, seed=0), []).append(run)
    table = []
    for config, runs in groups.items():
        own = [rows[run] for run in runs]
        table.append(
            {
                "method": runs[0].method,
                **{name: getattr(config, name) for name in varied},
                **_figures(own),
                "ratio_fp32": _ratio(FP32, config, groups, rows, own),
                "ratio_fp16": _ratio(FP16, config, groups, rows, own),
            }
        )
    return table


def _figures(rows: Sequence[Row]) -> Row:
    """Figures of the runs of all seeds; those without a result are counted."""
    done = [row for row in rows if "failure" not in row]
    failures = sorted({row["failure"] for row in rows if "failure" in row})
    found: Row = {"seeds": len(done)}
    if failures:
        found |= {"failed": len(rows) - len(done), "failures": failures}
    if not done:
        return found
    scores = [score for row in done if (score := score_value(row)) is not None]
    found["score"] = score_name(done[0])
    found["score_mean"] = mean(scores) if scores else None
    found["score_std"] = stdev(scores) if len(scores) > 1 else None
    for name in ("bytes_sent", "bytes_per_worker_step", "wall_time_s"):
        found[name] = mean(row[name] for row in done)
    bandwidths = done[0]["virtual_times_s"]
    found["virtual_times_s"] = {
        each: _mean_time([row["virtual_times_s"].get(each) for row in done]) for each in bandwidths
    }
    return found


def _mean_time(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return mean(known) if len(known) == len(times) else None


def _ratio(
    compression: str,
    config: Config,
    groups: Mapping[Config, Sequence[PlannedRun]],
    rows: Mapping[PlannedRun, Row],
    own: Sequence[Row],
) -> float | None:
    """Bytes sent with this compression in every step and all else equal, over those sent here."""
    settings: dict[str, Any] = {"compression": compression, "synchronization": "bsp"}
    base = groups.get(replace(config, **settings), ())
    there = [rows[run]["bytes_sent"] for run in base if "bytes_sent" in rows[run]]
    here = [row["bytes_sent"] for row in own if "bytes_sent" in row]
    if not there or not here or not mean(here):
        return None
    return mean(there) / mean(here)
