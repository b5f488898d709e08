"""`gradwire compare` and `gradwire demo`: several methods on one task."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.cli.console import Folder, Meter, new_folder, out
from gradwire.cli.ending import stopping
from gradwire.core.errors import UnfedWarning
from gradwire.experiment.report.comparison import (
    comparison_figure,
    comparison_table,
    format_seconds,
    notes,
    task_line,
)
from gradwire.experiment.report.drawing import FigureFormat
from gradwire.experiment.run.config import DIMENSION_NAMES, Config
from gradwire.experiment.studies.demo import demo_configs
from gradwire.runtime.storage.files import make_folder, naming, write_atomically

if TYPE_CHECKING:
    from gradwire.experiment.studies.compare import Outcome

_SETTINGS = [field.name for field in fields(Config)]


@dataclass(frozen=True)
class Choices(Config):
    """An experiment with several values for each of the four dimensions."""

    compression: tuple[str, ...] = ("identity",)  # type: ignore[assignment]
    """What travels; several values make several rows, besides identity and fp16."""
    synchronization: tuple[str, ...] = ("bsp",)  # type: ignore[assignment]
    """When workers agree; several values make several rows."""
    architecture: tuple[str, ...] = ("allreduce",)  # type: ignore[assignment]
    """How workers are connected; several values make several rows."""
    scheduling: tuple[str, ...] = ("sequential",)  # type: ignore[assignment]
    """When each part travels; several values make several rows."""


@dataclass(frozen=True)
class CompareCommand:
    """Compare methods on one task: every combination of the values given for the dimensions.

    fp32 and fp16 are always among them. `--config FILE` reads settings from a TOML file.
    """

    config: Choices
    out: Folder = None
    """Folder for records, table and figure; by default a new one under runs/."""
    figure_format: FigureFormat = "png"
    """Format of the figure."""
    json: bool = False
    """Print the table as JSON."""

    def __call__(self) -> None:
        from gradwire.experiment.studies.compare import combinations

        config = self.config
        shared = {name: getattr(config, name) for name in _SETTINGS if name not in DIMENSION_NAMES}
        choices = {name: getattr(config, name) for name in DIMENSION_NAMES}
        for name, chosen in choices.items():
            if not chosen:
                raise ValueError(
                    f"--{name} needs at least one value, such as --{name} {getattr(Config, name)}"
                )
        configs = combinations(Config(**shared), **choices)
        folder = self.out or new_folder("compare")
        _compare_and_show(configs, folder, self.json, self.figure_format)


@dataclass(frozen=True)
class DemoCommand:
    """Eight ways to exchange gradients: 4 virtual workers train a small network on digits."""

    out: Folder = None
    """Folder for records, table and figure; by default a new one under runs/."""
    figure_format: FigureFormat = "png"
    """Format of the figure."""
    json: bool = False
    """Print the table as JSON."""

    def __call__(self) -> None:
        with warnings.catch_warnings():
            # The demo shows on purpose that topk(0.01) is worse without feedback.
            warnings.simplefilter("ignore", UnfedWarning)
            folder = self.out or new_folder("demo")
            _compare_and_show(demo_configs(), folder, self.json, self.figure_format)


def _compare_and_show(
    configs: Sequence[Config], folder: Path, as_json: bool, figure_format: str
) -> None:
    from gradwire.experiment.studies.compare import compare, rows

    with stopping(lambda: f"interrupted; finished runs are in {folder}"), Meter() as meter:
        outcomes = compare(configs, folder, meter.follow)
    table = rows(outcomes)
    make_folder(folder)
    write_atomically(folder / "table.json", (json.dumps(table, indent=1) + "\n").encode())
    figure = folder / f"comparison.{figure_format}"
    with naming(figure):
        comparison_figure(outcomes, figure)
    if as_json:
        print(json.dumps(table))
        return
    out.print(_title(outcomes))
    out.print(comparison_table(table))
    for note in notes(table):
        out.print(note, markup=False)
    out.print(f"Figure: {figure}", soft_wrap=True)
    out.print(f"Records: {folder}", soft_wrap=True)


def _title(outcomes: Sequence[Outcome]) -> str:
    from gradwire.experiment.costs.coding_costs import describe_charge
    from gradwire.runtime.virtual.compute_time import COMPUTE_TIME, Fixed

    run = next((outcome.run for outcome in outcomes if outcome.run), None)
    config = run.config if run else outcomes[0].config
    charge = run.summary["coding"] if run else {"charged": "free"}  # there is no time to show
    compute = COMPUTE_TIME.parse(config.compute)
    seconds = format_seconds(compute.seconds) if isinstance(compute, Fixed) else config.compute
    return (
        f"{task_line(outcomes)}.\nVirtual time: {seconds} per gradient, latency {config.latency}.\n"
        f"Coding time: {describe_charge(charge)}."
    )
