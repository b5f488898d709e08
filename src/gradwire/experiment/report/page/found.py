"""The runs in some folders, with the names that a sweep or a comparison gave their methods."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.experiment.run.config import DIMENSION_NAMES, Config
from gradwire.experiment.run.record import Record, Row
from gradwire.experiment.studies.compare import folder_name, label
from gradwire.experiment.sweep.results import elsewhere, row_of, run_folders

_SWEEP, _COMPARISON = "results.jsonl", "table.json"


@dataclass(frozen=True)
class Found:
    """A run that has ended, or has no result."""

    folder: Path
    row: Row  # that of `gradwire.load`
    method: str
    summary: Row  # {}: it has no result

    @property
    def failure(self) -> str:
        return str(self.row.get("failure", ""))

    @property
    def settings(self) -> Row:
        return {name: self.row[name] for name in vars(Config())}

    @property
    def records(self) -> list[Record]:
        """Its record, and those of the same run on other networks."""
        return [Record(self.folder), *elsewhere(self.folder)]


def find_runs(folders: Sequence[Path]) -> tuple[list[Found], int]:
    """The runs in these folders and below them, in the order of their tables.

    Also the number of runs that have not ended, which are left out.
    """
    found: dict[Path, Found] = {}
    num_unfinished = 0
    for top in folders:
        own: list[tuple[float, Found]] = []
        places = list(run_folders(top))
        names: dict[Path, tuple[dict[str, str], dict[str, int]]] = {}
        num_ended = 0
        for folder in places:
            row = row_of(folder)
            if row is None:
                continue
            num_ended += 1
            if folder.resolve() in found:
                continue
            parent = folder.resolve().parent
            if parent not in names:
                names[parent] = _names(parent)
            methods, order = names[parent]
            name = methods.get(folder.name) or label_of(row)
            summary = {} if "failure" in row else Record(folder).summary
            place = order.get(folder.name, len(order))
            own.append((place, Found(folder, row, name, summary)))
        if not num_ended:
            raise ValueError(_nothing(top, len(places)))
        num_unfinished += len(places) - num_ended
        for _, run in sorted(own, key=lambda pair: pair[0]):  # stable: else by folder
            found[run.folder.resolve()] = run
    return list(found.values()), num_unfinished


def _nothing(folder: Path, num_runs: int) -> str:
    if num_runs:
        runs = "the run" if num_runs == 1 else f"each of the {num_runs} runs"
        return (
            f"{folder} has no run that has ended: {runs} in it is unfinished. Continue it with "
            "gradwire run --resume FOLDER, or with the command of the sweep."
        )
    return (
        f"{folder} has no run in it. Name the folder of a run, a sweep or a comparison, such as "
        "runs/NAME."
    )


def _names(parent: Path) -> tuple[dict[str, str], dict[str, int]]:
    """What a table next to runs calls them, and their places in it, by the name of the folder."""
    rows: list[tuple[str, str]] = []
    sweep, comparison = parent.parent / _SWEEP, parent / _COMPARISON
    if sweep.is_file():
        lines = map(json.loads, sweep.read_text().splitlines())
        rows = [(line["folder"], line["method"]) for line in lines]
    elif comparison.is_file():
        table = json.loads(comparison.read_text())
        rows = [(folder_name(line["method"]), line["method"]) for line in table]
    return dict(rows), {folder: number for number, (folder, _) in enumerate(rows)}


def label_of(settings: Row) -> str:
    """What a method with these settings is called: its dimensions, without the default ones."""
    chosen: dict[str, Any] = {name: settings[name] for name in DIMENSION_NAMES}
    return label(Config(**chosen))
