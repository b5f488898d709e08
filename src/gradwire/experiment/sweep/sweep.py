"""`sweep`: does the runs of a file that are not done yet, and collects the results of all."""

import contextlib
import fcntl
import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from gradwire.experiment.report.notebook import sweep_results_html
from gradwire.experiment.run.record import Row
from gradwire.experiment.run.setup import prepare
from gradwire.experiment.studies.compare import check
from gradwire.experiment.sweep.plan import PlannedRun, plan_runs, read_sweep, varied_settings
from gradwire.experiment.sweep.pool import default_jobs, run_all
from gradwire.experiment.sweep.results import forget_failure, row_of, write_lines
from gradwire.experiment.sweep.summary import summarize
from gradwire.runtime.storage import text
from gradwire.runtime.storage.files import make_folder, naming, write_atomically
from gradwire.runtime.virtual.compute_time import COMPUTE_TIME, Measured

_RUNS, _LOGS, _LOCK, _COMPUTE = "runs", "logs", "lock", "compute.json"
RESULTS = "results.jsonl"


class Watcher(Protocol):
    """Learns how a sweep goes on."""

    def begin(self, num_runs: int, num_done: int) -> None: ...

    def step(self, run: PlannedRun, step: int, steps: int) -> None: ...

    def end(self, run: PlannedRun, row: Row) -> None: ...


@dataclass(frozen=True)
class Results:
    """The results of a sweep: `rows`, one for each run, and `table`, without seeds."""

    folder: Path
    rows: list[Row]
    varied: list[str]  # settings besides the method and the seed
    table: list[Row]  # means and standard deviations over seeds

    def _repr_html_(self) -> str:
        return sweep_results_html(self.rows, self.table, self.varied, self.folder / _RUNS)


def sweep(
    settings: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    jobs: int | None = None,
    retry: bool = False,
    watcher: Watcher | None = None,
    imports: Sequence[str] = (),
) -> Results:
    """Does every combination of settings, and returns the results.

        results = gradwire.sweep(
            {"compression": ["identity", "ef(sign)"], "seed": [0, 1, 2]}, out="runs/signs"
        )

    `settings` are those of `Config`, any of which may be a list, or the path of a TOML file with
    them. Runs that are done in the folder `out` are not done again, interrupted ones continue.
    `jobs`: how many at a time, by default as many as cores and memory allow. `retry`: runs that
    had no result (diverged, refused) are tried again. `imports`: modules that register algorithms
    of your own; each process of the sweep imports them.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    for module in imports:
        importlib.import_module(module)
    is_file = isinstance(settings, str | Path)
    planned = read_sweep(Path(settings)) if is_file else plan_runs(settings)  # type: ignore
    for run in planned:
        if run.config.engine != "simulator":
            raise ValueError(
                "a sweep runs on the simulator; real processes run one experiment at a time: "
                "gradwire run --engine process"
            )
    check(planned[0].config)  # what is missing for all, such as data, is an error at once
    folder = Path(out)
    with _alone(folder):
        return _sweep(planned, folder, jobs, retry, watcher or _Nobody(), imports)


class _Nobody:
    def begin(self, num_runs: int, num_done: int) -> None: ...

    def step(self, run: PlannedRun, step: int, steps: int) -> None: ...

    def end(self, run: PlannedRun, row: Row) -> None: ...


def _sweep(
    planned: Sequence[PlannedRun],
    folder: Path,
    jobs: int | None,
    retry: bool,
    watcher: Watcher,
    imports: Sequence[str],
) -> Results:
    rows: dict[PlannedRun, Row] = {}
    for run in planned:
        own = folder / _RUNS / run.folder
        if retry:
            forget_failure(own)
        row = row_of(own)
        if row is not None:
            rows[run] = row
    left = [run for run in planned if run not in rows]
    watcher.begin(len(planned), len(rows))
    timed = dict(zip(left, _with_times(left, folder / _COMPUTE)))

    def on_end(run: PlannedRun, why: str) -> None:
        own = folder / _RUNS / run.folder
        found = row_of(own)
        if found is None:  # it may have one next time
            found = {**vars(run.config), "failure": why, "folder": run.folder}
        rows[run] = found
        _write(folder, planned, rows)
        watcher.end(run, found)

    make_folder(folder / _LOGS)
    threads = max((run.config.threads for run in left), default=1)
    run_all(
        left,
        lambda run: folder / _RUNS / run.folder,
        jobs or default_jobs(threads),
        folder / _LOGS,
        timed.__getitem__,
        watcher.step,
        on_end,
        imports,
    )
    ordered = _write(folder, planned, rows)
    return Results(folder, ordered, varied_settings(planned), summarize(planned, rows))


def _write(
    folder: Path, planned: Sequence[PlannedRun], rows: Mapping[PlannedRun, Row]
) -> list[Row]:
    """Writes the rows that there are, in the order of the plan."""
    ordered = [{"method": run.method, **rows[run]} for run in planned if run in rows]
    write_lines(folder / RESULTS, ordered)
    return ordered


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps another sweep out of the folder."""
    make_folder(folder)
    path = folder / _LOCK
    with naming(path), path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another sweep is at work in {folder}: wait until it ends, or give another --out"
            ) from None
        yield


def _with_times(runs: Sequence[PlannedRun], path: Path) -> list[Any]:
    """The configurations of runs, with gradients that take a given time.

    A time that is to be measured is measured here, before several runs disturb each other, once for
    each task; a sweep that continues takes the same one.
    """
    known: dict[str, str] = text.open_json(path) if path.exists() else {}
    found = []
    for run in runs:
        config = run.config
        if isinstance(COMPUTE_TIME.parse(config.compute), Measured):
            parts = (config.data, config.model, config.batch_size, config.device, config.threads)
            key = " ".join(map(str, (config.compute, *parts)))
            if key not in known:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    known[key] = prepare(replace(config, what_if=())).config.compute
                write_atomically(path, text.seal_json(known).encode())
            config = replace(config, compute=known[key])
        found.append(config)
    return found
