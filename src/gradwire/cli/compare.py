"""`gradwire compare` and `gradwire demo`: several methods on one task."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from gradwire.cli.console import Folder, Meter, errors, new_folder, out
from gradwire.experiment.coding_costs import describe_charge
from gradwire.experiment.compare import Outcome, combinations, compare, rows
from gradwire.experiment.config import Config
from gradwire.experiment.demo import demo_configs
from gradwire.experiment.report import comparison_figure, comparison_table, format_seconds, notes
from gradwire.experiment.setup import DIMENSIONS
from gradwire.runtime.compute_time import COMPUTE_TIME, Fixed

_SETTINGS = [field.name for field in fields(Config)]


@dataclass(frozen=True)
class Choices(Config):
    """An experiment with several values for each of the four dimensions."""

    compression: tuple[str, ...] = ("identity",)  # type: ignore[assignment]
    """What travels; several values make several rows, besides identity and fp16."""
    synchronization: tuple[str, ...] = ("bsp",)  # type: ignore[assignment]
    """When workers agree; several values make several rows."""
    architecture: tuple[str, ...] = ("allreduce",)  # type: ignore[assignment]
    """Who talks to whom; several values make several rows."""
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
    json: bool = False
    """Print the table as JSON."""

    def __call__(self) -> None:
        config = self.config
        shared = {name: getattr(config, name) for name in _SETTINGS if name not in DIMENSIONS}
        choices = {name: getattr(config, name) for name in DIMENSIONS}
        configs = combinations(Config(**shared), **choices)
        _compare_and_show(configs, self.out or new_folder("compare"), self.json)


@dataclass(frozen=True)
class DemoCommand:
    """Eight ways to exchange gradients: 4 virtual workers train a small network on digits."""

    out: Folder = None
    """Folder for records, table and figure; by default a new one under runs/."""
    json: bool = False
    """Print the table as JSON."""

    def __call__(self) -> None:
        _compare_and_show(demo_configs(), self.out or new_folder("demo"), self.json)


def _compare_and_show(configs: Sequence[Config], folder: Path, as_json: bool) -> None:
    try:
        with Meter() as meter:
            outcomes = compare(configs, folder, meter.follow)
    except KeyboardInterrupt:
        errors.print(f"interrupted; what is finished lies in {folder}", soft_wrap=True)
        raise
    table = rows(outcomes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.json").write_text(json.dumps(table, indent=1) + "\n")
    figure = folder / "comparison.png"
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
    run = next((outcome.run for outcome in outcomes if outcome.run), None)
    config = run.config if run else outcomes[0].config
    charge = run.summary["coding"] if run else {"charged": "free"}  # there is no time to show
    compute = COMPUTE_TIME.parse(config.compute)
    seconds = format_seconds(compute.seconds) if isinstance(compute, Fixed) else config.compute
    return (
        f"{config.workers} workers, {config.model} on {config.data}, {config.steps} steps of "
        f"batch {config.batch_size}.\nVirtual time: {seconds} per gradient, latency "
        f"{config.latency}.\nCoding time: {describe_charge(charge)}."
    )
