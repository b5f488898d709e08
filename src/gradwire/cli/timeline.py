"""`gradwire timeline`: what each worker and each network card does when."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich import box
from rich.table import Table

from gradwire.cli.console import Folder, out
from gradwire.cli.defaults import world_size
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.run.config import Config
from gradwire.runtime.storage.files import naming, write_atomically

if TYPE_CHECKING:
    from gradwire.experiment.timeline.chart import Panel
    from gradwire.runtime.spans import SpanLog

_SETTINGS = [field.name for field in fields(Config)]


@dataclass(frozen=True)
class TimelineConfig(Config):
    """An experiment with several synchronizations."""

    synchronization: tuple[str, ...] = ("bsp",)  # type: ignore[assignment]
    """When workers agree; several values make several panels."""


@dataclass(frozen=True)
class TimelineCommand:
    """Draw what workers and network cards do in a few steps, simulated or on real processes.

    `--config FILE` reads settings from a TOML file.
    """

    config: TimelineConfig
    run: Folder = None
    """Draw the run in this folder, which was recorded with --record-spans."""
    steps_shown: int = 2
    """How many steps to show."""
    skip: int = 2
    """How many steps to leave out before them."""
    out: Annotated[Path, tyro.conf.arg(metavar="PATH")] = Path("timeline.png")
    """Draw the picture into this file: .png, .pdf or .svg."""
    trace: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Also write a Chrome trace, which https://ui.perfetto.dev opens, into this .json file."""
    json: bool = False
    """Print the figures as JSON."""

    def __call__(self) -> None:
        self._check()
        from gradwire.experiment.timeline.analysis import window_of
        from gradwire.experiment.timeline.chart import Panel, draw

        logs = self._logs()
        panels = [
            Panel(title, log, window_of(log, self.skip, self.steps_shown))
            for title, log in logs.items()
        ]
        several = len(panels) > 1
        with naming(self.out):
            rest = replace(self.config, architecture=self._architecture())
            draw(panels, self.out, _rest(rest) if several else "")
        if self.trace is not None:
            _write_trace(panels[0], self.trace)
        _show(panels, self.json)
        if not self.json:
            out.print(f"Figure: {self.out}", soft_wrap=True)
            if self.trace is not None:
                out.print(f"Trace: {self.trace} (open it in ui.perfetto.dev)", soft_wrap=True)

    def _check(self) -> None:
        config = self.config
        if self.steps_shown < 1 or self.skip < 0:
            raise ValueError(
                f"--steps-shown must be at least 1 and --skip at least 0, got {self.steps_shown} "
                f"and {self.skip}"
            )
        if self.out.suffix not in (".png", ".pdf", ".svg"):
            raise ValueError(f"--out takes a .png, .pdf or .svg file, got {self.out}")
        for path in (self.out, self.trace):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"there is no folder {path.parent}: make it first")
        if not config.synchronization:
            raise ValueError("--synchronization needs at least one value, such as bsp")
        if self.trace is not None and len(config.synchronization) > 1:
            raise ValueError("--trace takes one run: give one --synchronization")
        if self.run is not None and config != TimelineConfig():
            raise ValueError("--run draws what was recorded; give no settings of a run")
        if self.run is None and world_size() is not None:
            raise ValueError(
                "gradwire timeline starts its own ranks: leave out torchrun, or record with "
                "gradwire run --record-spans and draw with gradwire timeline --run FOLDER"
            )

    def _architecture(self) -> str:
        """The one that is given; by default one on which all synchronizations run."""
        from gradwire.architecture import ARCHITECTURE
        from gradwire.synchronization import SYNCHRONIZATION

        if self.config.architecture != Config().architecture:
            return self.config.architecture
        rules = [SYNCHRONIZATION.parse(text) for text in self.config.synchronization]
        offered = ARCHITECTURE.parse(self.config.architecture).offers
        needs_servers = not all(set(rule.needs) & set(offered) for rule in rules)
        return "parameter_server" if needs_servers else self.config.architecture

    def _logs(self) -> dict[str, SpanLog]:
        """What is drawn, by title."""
        from gradwire.experiment.timeline.store import read_log

        if self.run is not None:
            return {str(self.run): read_log(self.run)}
        shared = {name: getattr(self.config, name) for name in _SETTINGS}
        shared["architecture"] = self._architecture()
        logs = {}
        for synchronization in self.config.synchronization:
            config = Config(**{**shared, "synchronization": synchronization})
            several = len(self.config.synchronization) > 1
            title = synchronization if several else f"{synchronization} | {_rest(config)}"
            logs[title] = _record(config, self.skip + self.steps_shown)
        return logs


def _rest(config: Config) -> str:
    """The other three dimensions."""
    return f"{config.compression} | {config.architecture} | {config.scheduling}"


def _record(config: Config, num_steps: int) -> SpanLog:
    from gradwire.cli.processes import ProcessRun, run_processes
    from gradwire.experiment.processes.launch.scratch import scratch_folder
    from gradwire.experiment.timeline.recording import few_steps, record_simulated
    from gradwire.experiment.timeline.store import read_log

    if config.engine == "simulator":
        return record_simulated(config, num_steps)
    with scratch_folder() as place:
        folder = place / "run"
        few = replace(few_steps(config, num_steps), record_spans=True)
        job = ProcessRun(few, folder, False, "1000s", "300s", 0, True, False)
        with _results_to_stderr():
            run_processes(job, lambda run, where: None)
        return read_log(folder)


@contextlib.contextmanager
def _results_to_stderr() -> Iterator[None]:
    """Lets the ranks, which inherit it, print their result as if it were progress."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _write_trace(panel: Panel, path: Path) -> None:
    from gradwire.experiment.timeline.analysis import clip
    from gradwire.experiment.timeline.chrome import chrome_trace

    trace = chrome_trace(panel.log, clip(panel.log.spans, panel.window))
    write_atomically(path, (json.dumps(trace) + "\n").encode())


def _show(panels: Sequence[Panel], as_json: bool) -> None:
    from gradwire.experiment.timeline.report import figures_of

    figures = {panel.title: figures_of(panel.log, panel.window) for panel in panels}
    if as_json:
        print(json.dumps(figures))
        return
    for title, row in figures.items():
        out.print(title, style="bold", markup=False)
        out.print(_table(row["workers"]))
        path = ", ".join(
            f"{kind} {format_seconds(seconds)}" for kind, seconds in row["critical_path_s"].items()
        )
        out.print(f"Shown: {format_seconds(row['window_s'])}. Critical path: {path}.\n")


def _table(workers: Sequence[dict[str, float]]) -> Table:
    """Exposed communication of each worker, and the share of the time each lane was busy."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=0)
    for column in ("rank", "exposed\ncomm.", "idle\ncard"):
        table.add_column(column, justify="right", no_wrap=True)
    lanes = [name for name in workers[0] if name.startswith("busy_")]
    for lane in lanes:
        table.add_column(lane.removeprefix("busy_"), justify="right", no_wrap=True)
    for row in workers:
        table.add_row(
            str(row["rank"]),
            f"{format_seconds(row['exposed_s'])} {100 * row['exposed_share']:.0f}%",
            format_seconds(row["waiting_for_others_s"]),
            *(f"{100 * row[lane]:.0f}%" for lane in lanes),
        )
    return table
