"""The command line: `gradwire run`, `compare`, `codecs`, `rd`, `list`, `demo`.

Results go to standard output, progress to standard error: a bar on a terminal, plain lines
otherwise. Every command prints machine-readable output with `--json`.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradwire import data, kernels
from gradwire.coding.polar.construction import Construction
from gradwire.core.errors import DataError
from gradwire.core.notation import Registry
from gradwire.experiment.codecs import NUMEL, codecs_tables, measure
from gradwire.experiment.compare import Outcome, combinations, compare, rows
from gradwire.experiment.config import Config
from gradwire.experiment.demo import demo_configs
from gradwire.experiment.rd import LENGTHS, RATES, rd_figure, rd_tables
from gradwire.experiment.rd import measure as measure_rd
from gradwire.experiment.record import Row
from gradwire.experiment.report import (
    comparison_figure,
    comparison_table,
    format_bytes,
    format_seconds,
    network_names,
    notes,
)
from gradwire.experiment.runner import Run, resume, simulate
from gradwire.experiment.setup import DIMENSIONS, MODELS, OPTIMIZERS, PARTITIONS, SCHEDULES
from gradwire.runtime.compute_time import COMPUTE_TIME, STRAGGLERS, Fixed

_errors = Console(stderr=True)
_out = Console()
KINDS: dict[str, Registry[Any]] = {
    **DIMENSIONS,
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "partition": PARTITIONS,
    "compute": COMPUTE_TIME,
    "stragglers": STRAGGLERS,
}
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]
_SETTINGS = [field.name for field in fields(Config)]


@dataclass(frozen=True)
class Choices(Config):
    """An experiment with several values for each of the four dimensions."""

    compression: tuple[str, ...] = ("identity", "fp16")  # type: ignore[assignment]
    """What travels; several values make several rows."""
    synchronization: tuple[str, ...] = ("bsp",)  # type: ignore[assignment]
    """When workers agree; several values make several rows."""
    architecture: tuple[str, ...] = ("allreduce",)  # type: ignore[assignment]
    """Who talks to whom; several values make several rows."""
    scheduling: tuple[str, ...] = ("sequential",)  # type: ignore[assignment]
    """When each part travels; several values make several rows."""


class _Meter:
    """Progress of one run at a time, on standard error."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeElapsedColumn(),
            console=_errors,
        )
        self._terminal = _errors.is_terminal

    def __enter__(self) -> "_Meter":
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._bar.stop()

    def follow(self, name: str) -> Any:
        """A progress callback for the run of this name."""
        if self._terminal:
            task = self._bar.add_task(name, total=None, accuracy="")

            def advance(row: Row, steps: int) -> None:
                accuracy = f"{100 * row['test_accuracy']:.1f}%"
                self._bar.update(task, completed=row["step"], total=steps, accuracy=accuracy)

            return advance

        def line(row: Row, steps: int) -> None:
            print(
                f"{name}: step {row['step']}/{steps}, test accuracy "
                f"{100 * row['test_accuracy']:.1f}%, virtual time "
                f"{format_seconds(row['virtual_time_s'])}",
                file=sys.stderr,
                flush=True,
            )

        return line


@dataclass(frozen=True)
class RunCommand:
    """Run one experiment on the simulator. `--config FILE` reads settings from a TOML file."""

    config: Config
    out: Folder = None
    """Folder for the records; by default a new one under runs/."""
    resume: Folder = None
    """Go on with the interrupted run in this folder; its own settings hold."""
    json: bool = False
    """Print the summary as JSON."""

    def __call__(self) -> None:
        if self.resume is not None and (self.config != Config() or self.out is not None):
            raise ValueError("--resume goes on with the run's own settings; give no others")
        folder = self.resume or self.out or _new_folder("run")
        try:
            with _Meter() as meter:
                progress = meter.follow(folder.name)
                if self.resume is not None:
                    result = resume(self.resume, progress)
                else:
                    result = simulate(self.config, out=folder, progress=progress)
        except KeyboardInterrupt:
            if (folder / "config.toml").exists():
                _errors.print(f"interrupted; go on: gradwire run --resume {folder}", soft_wrap=True)
            raise
        if self.json:
            print(json.dumps(result.summary))
            return
        _out.print(_run_table(result))
        _out.print(f"Records: {folder}", soft_wrap=True)


def _momentum(config: Config) -> str:
    """Where momentum acts, if it does not where everybody expects it."""
    return ", momentum before compression" if config.momentum_at == "before" else ""


def _run_table(run: Run) -> Table:
    config, summary = run.config, run.summary
    times = {config.bandwidth: run.virtual_time_s, **summary["virtual_times_s"]}
    table = Table(show_header=False, box=None)
    lines = {
        "task": f"{config.model} on {config.data}, {summary['parameters']:,} parameters",
        "method": f"{config.compression} | {config.synchronization} | {config.architecture} | "
        f"{config.scheduling}",
        "optimizer": f"{config.optimizer}{_momentum(config)}",
        "workers": f"{config.workers} x batch {config.batch_size}, {summary['steps']} steps",
        "test accuracy": f"{100 * run.accuracy:.2f}%",
        "bytes sent": f"{format_bytes(run.bytes_sent)} in {summary['messages_sent']:,} messages, "
        f"{format_bytes(summary['bytes_per_worker_step'])} per worker and step",
        **{
            f"virtual time at {name}": format_seconds(seconds)
            for name, seconds in zip(network_names(list(times)), times.values())
        },
        "compute time": config.compute,
        **({"dropped steps": str(n)} if (n := summary["dropped_steps"]) else {}),
        "wall time": f"{summary['wall_time_s']:.1f} s with {summary['kernels']} kernels",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    return table


@dataclass(frozen=True)
class CompareCommand:
    """Compare methods on one task: every combination of the values given for the dimensions.

    fp32 and fp16 are always among them. `--config FILE` reads settings from a TOML file.
    """

    config: Choices
    out: Folder = None
    """Folder for records, table and figure; by default a new one under runs/."""
    json: bool = False
    """Print the table as JSON."""

    def __call__(self) -> None:
        config = self.config
        shared = {name: getattr(config, name) for name in _SETTINGS if name not in DIMENSIONS}
        choices = {name: getattr(config, name) for name in DIMENSIONS}
        configs = combinations(Config(**shared), **choices)
        _compare_and_show(configs, self.out or _new_folder("compare"), self.json)


@dataclass(frozen=True)
class DemoCommand:
    """Eight ways to exchange gradients: 4 virtual workers train a small network on digits."""

    out: Folder = None
    """Folder for records, table and figure; by default a new one under runs/."""
    json: bool = False
    """Print the table as JSON."""

    def __call__(self) -> None:
        _compare_and_show(demo_configs(), self.out or _new_folder("demo"), self.json)


def _compare_and_show(configs: Sequence[Config], folder: Path, as_json: bool) -> None:
    try:
        with _Meter() as meter:
            outcomes = compare(configs, folder, meter.follow)
    except KeyboardInterrupt:
        _errors.print(f"interrupted; what is finished lies in {folder}", soft_wrap=True)
        raise
    table = rows(outcomes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    figure = folder / "comparison.png"
    comparison_figure(outcomes, figure)
    if as_json:
        print(json.dumps(table))
        return
    _out.print(_title(outcomes))
    _out.print(comparison_table(table))
    for note in notes(table):
        _out.print(note, markup=False)
    _out.print(f"Figure: {figure}", soft_wrap=True)
    _out.print(f"Records: {folder}", soft_wrap=True)


def _title(outcomes: Sequence[Outcome]) -> str:
    run = next((outcome.run for outcome in outcomes if outcome.run), None)
    config = run.config if run else outcomes[0].config
    compute = COMPUTE_TIME.parse(config.compute)
    seconds = format_seconds(compute.seconds) if isinstance(compute, Fixed) else config.compute
    return (
        f"{config.workers} workers, {config.model} on {config.data}, {config.steps} steps of "
        f"batch {config.batch_size}.\nVirtual time: {seconds} per gradient, latency "
        f"{config.latency}."
    )


@dataclass(frozen=True)
class ListCommand:
    """Every algorithm by dimension, with one line and its paper."""

    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        entries = [
            {
                "dimension": kind,
                "name": name,
                "example": (registry[name].examples or (name,))[0],
                "summary": registry[name].summary(),
                "paper": registry[name].paper,
            }
            for kind, registry in KINDS.items()
            for name in registry.names()
        ]
        if self.json:
            print(json.dumps({"algorithms": entries, "data": data.names()}))
            return
        for kind in KINDS:
            table = Table(title=kind, title_justify="left", box=None, header_style="dim")
            table.add_column("write", no_wrap=True, style="bold")
            table.add_column("what it does")
            table.add_column("paper", style="dim")
            for entry in entries:
                if entry["dimension"] == kind:
                    table.add_row(entry["example"], entry["summary"], entry["paper"])
            _out.print(table)
            _out.print()
        _out.print(f"data: {', '.join(data.names())}")
        _out.print(f"kernels: {kernels.backend()}")


@dataclass(frozen=True)
class CodecsCommand:
    """Bits, error and speed of every codec, on drawn vectors and on saved gradients."""

    only: tuple[str, ...] = ()
    """Measure these alone: names such as topk, or expressions such as "topk(0.1) >> fp16"."""
    numel: int = NUMEL
    """Length of the drawn vectors."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        with _progress() as progress:
            measured = measure(self.only, self.numel, progress)
        if self.json:
            print(json.dumps(measured))
            return
        for table in codecs_tables(measured):
            _out.print(table)
        _out.print("/copy: time over a memcpy of the same vector; one thread, best of a few.")
        _out.print(f"kernels: {kernels.backend()}")


@dataclass(frozen=True)
class RDCommand:
    """Rate and distortion of polar codes on random bits, next to Shannon's bound.

    Every combination of the values given is measured; lists go with hard decisions only.
    """

    n: tuple[int, ...] = LENGTHS
    """Block lengths, powers of two."""
    rate: tuple[float, ...] = RATES
    """Bits sent per bit."""
    blocks: int | None = None
    """Blocks per code; by default as many as make two million bits."""
    decision: tuple[Literal["hard", "randomized"], ...] = ("hard", "randomized")
    """How a bit is decided: the likelier value, or drawn as likely as it is (with the exact f)."""
    construction: tuple[Construction, ...] = ("monte_carlo",)
    """How the free positions are found. tal_vardy takes 4 s at N = 8192, minutes at 2^19."""
    list_size: tuple[int, ...] = (1,)
    """Codewords kept in mind, up to 32; more take longer, other than 2, 4, 8 .. much (in torch)."""
    seed: int = 0
    """Of the random bits."""
    figure: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Draw the figure into this file, in a folder that exists: .png, .pdf or .svg."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        if self.figure is not None:
            _check_figure(self.figure)
        with _progress() as progress:
            measured = measure_rd(
                self.n,
                self.rate,
                self.blocks,
                self.decision,
                self.construction,
                self.list_size,
                self.seed,
                progress,
            )
        if self.figure is not None:
            rd_figure(measured, self.figure)
        if self.json:
            print(json.dumps(measured))
            return
        _out.print("Share of random bits that arrive wrong where R bits are sent for each.")
        for table in rd_tables(measured):
            _out.print(table)
        _out.print(
            "bound: Shannon's D(R). In brackets: standard error, in units of the last digit."
        )
        if self.figure is not None:
            _out.print(f"Figure: {self.figure}", soft_wrap=True)


def _check_figure(path: Path) -> None:
    """Before minutes of measuring: can the figure be written?"""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--figure takes a .png, .pdf or .svg file, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--figure: there is no folder {path.parent}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--figure: {path} cannot be written")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callback that says on standard error what is measured."""
    with _errors.status("") as status:  # shows nothing where there is no terminal

        def progress(what: str, done: int, total: int) -> None:
            status.update(f"{done}/{total} {escape(what)}")
            if not _errors.is_terminal and what:
                print(f"{done + 1}/{total} {what}", file=sys.stderr, flush=True)

        yield progress


def _new_folder(kind: str) -> Path:
    return Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"


def _split_config(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Takes `--config FILE` out of the arguments: its settings become the defaults."""
    for position, argument in enumerate(argv):
        name, equals, path = argument.partition("=")
        if name != "--config":
            continue
        after = position + (1 if equals else 2)
        if not equals:
            path = argv[position + 1] if position + 1 < len(argv) else ""
        if not path:
            raise ValueError("--config needs a file: gradwire run --config experiment.toml")
        return vars(Config.from_toml(Path(path))), argv[:position] + argv[after:]
    return {}, argv


def _command(argv: list[str]) -> Any:
    """The command that the arguments describe, ready to be called."""
    settings, argv = _split_config(argv)
    if settings and argv and argv[0] not in ("run", "compare"):
        raise ValueError(f"--config goes with run and compare, not with {argv[0]}")
    several: dict[str, Any] = {n: (v,) if n in DIMENSIONS else v for n, v in settings.items()}
    commands = {
        "run": RunCommand(Config(**settings)),
        "compare": CompareCommand(Choices(**several)),
        "codecs": CodecsCommand(),
        "rd": RDCommand(),
        "list": ListCommand(),
        "demo": DemoCommand(),
    }
    choices = tuple(
        Annotated[type(default), tyro.conf.subcommand(name, default=default)]
        for name, default in commands.items()
    )
    union: Any = Union.__getitem__(choices)  # `A | B`, for a number of them known at run time
    return tyro.cli(
        union,
        prog="gradwire",
        description="Communication-efficient data-parallel training: simulate, measure, compare.",
        args=argv,
        config=(
            tyro.conf.OmitArgPrefixes,
            tyro.conf.OmitSubcommandPrefixes,
            tyro.conf.FlagCreatePairsOff,
        ),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `gradwire` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _command(arguments)()
    except BrokenPipeError:  # the reader of our output has seen enough
        sys.stderr.close()
        sys.exit(141)
    except (ValueError, DataError, OSError) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        _errors.print(f"error: {error}{notes}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
