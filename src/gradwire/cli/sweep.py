"""`gradwire sweep`: many experiments from one file, in which any setting may be a list."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gradwire.cli.console import Folder, errors, out, write_line
from gradwire.cli.ending import stopping
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.report.score import format_score, score_name

if TYPE_CHECKING:
    from gradwire.experiment.run.record import Row
    from gradwire.experiment.sweep.plan import PlannedRun


@dataclass(frozen=True)
class SweepCommand:
    """Do every combination of the settings in a TOML file, in which any setting may be a list.

    Several runs go at a time, in processes of their own. Runs that are done in the folder are not
    done again; the same command continues a sweep that was interrupted.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE.toml")]
    """Settings of `gradwire run`, as in its config.toml."""
    out: Folder = None
    """Folder for the records; by default runs/ and the name of the file."""
    jobs: int = 0
    """How many runs at a time; 0: as cores and memory allow."""
    retry: bool = False
    """Try runs again that had no result: diverged, refused."""
    json: bool = False
    """Print the table as JSON."""

    def __call__(self) -> None:
        from gradwire.experiment.report.sweep import sweep_notes, sweep_table
        from gradwire.experiment.sweep.sweep import RESULTS, sweep

        folder = self.out or Path("runs") / self.file.stem
        advice = f"interrupted; to continue: gradwire sweep {self.file} --out {folder}"
        with stopping(lambda: advice), Meter() as meter:
            jobs = self.jobs or None
            results = sweep(self.file, folder, jobs=jobs, retry=self.retry, watcher=meter)
        if self.json:
            print(json.dumps(results.table))
            return
        out.print(sweep_table(results.table, results.varied))
        for note in sweep_notes(results.table):
            out.print(note, markup=False, soft_wrap=True)
        out.print(f"Results: {folder / RESULTS}", soft_wrap=True)


class Meter:
    """Progress on standard error: bars on a terminal, else a line for each run that has ended."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=errors,
        )
        self._is_terminal = errors.is_terminal
        self._tasks: dict[PlannedRun, Any] = {}
        self._num_runs = self._num_ended = self._num_before = 0
        self._began = time.monotonic()

    def __enter__(self) -> Meter:
        if self._is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            self._bars.stop()

    def begin(self, num_runs: int, num_done: int) -> None:
        self._num_runs, self._num_ended = num_runs, num_done
        self._num_before = num_done
        if num_done:
            write_line(f"{num_done} of {num_runs} runs were done before")
        self._whole = self._bars.add_task("runs", total=num_runs, completed=num_done)

    def step(self, run: PlannedRun, step: int, steps: int) -> None:
        if self._is_terminal:
            if run not in self._tasks:
                self._tasks[run] = self._bars.add_task(run.title, total=steps)
            self._bars.update(self._tasks[run], completed=step)

    def end(self, run: PlannedRun, row: Row) -> None:
        self._num_ended += 1
        if self._is_terminal:
            self._bars.update(self._whole, completed=self._num_ended)
            if run in self._tasks:
                self._bars.remove_task(self._tasks.pop(run))
            return
        result = row.get("failure", "").partition("\n")[0]
        result = result or f"test {score_name(row)} {format_score(row)}"
        write_line(f"{self._num_ended}/{self._num_runs} {run.title}: {result}{self._left()}")

    def _left(self) -> str:
        """The time that is left, if the other runs take as long as those so far."""
        num_left = self._num_runs - self._num_ended
        each = (time.monotonic() - self._began) / (self._num_ended - self._num_before)
        return f"; about {format_seconds(each * num_left)} left" if num_left else ""
