"""Recipes that train networks: each cell of a table is a setting of `gradwire run`, over seeds.

Cells run as a sweep (`experiment/sweep`): several at a time, those that are done are kept, and one
that was interrupted continues from its last checkpoint.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from gradwire.experiment.repro.recipe import Means, Recipe, Row, chosen_names
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.sweep.plan import METHOD, plan_runs
from gradwire.experiment.sweep.sweep import sweep

_SUM = ("bytes_sent", "bytes_per_worker_step", "busiest_node_bytes", "wall_time_s", "test_loss")


@dataclass(frozen=True)
class Cell:
    """One figure of a table."""

    line: str  # what the line of the table is called
    column: str
    settings: Mapping[str, Any]
    published: float | None = None  # accuracy in per cent

    @property
    def name(self) -> str:
        return f"{self.line}, {self.column}"


class Trained(Recipe):
    """A table of accuracies."""

    num_seeds: Mapping[Scale, int] = {"smoke": 1, "small": 1, "full": 1}

    @abstractmethod
    def cells(self, scale: Scale) -> Iterable[Cell]:
        """All cells of the table, in the order in which they are worth having."""

    def shared(self, scale: Scale) -> dict[str, Any]:
        """The settings of all cells."""
        return {}

    # Modules that define algorithms of the recipe's own.
    imports: tuple[str, ...] = ()

    def measure(self, means: Means) -> list[Row]:
        cells = chosen(list(self.cells(means.scale)), means.only)
        seeds = list(range(means.seeds or self.num_seeds[means.scale]))
        shared = {**self.shared(means.scale), "device": means.device, "seed": seeds}
        with_methods = {**shared, METHOD: [dict(cell.settings) for cell in cells]}
        results = sweep(
            with_methods,
            means.folder,
            jobs=means.jobs,
            watcher=means.watcher,
            imports=self.imports,
        )
        # Tables have cells in common; their runs are found by their settings.
        by_digest = {row["folder"].rpartition("-")[2]: row for row in results.rows}
        return [
            _row(cell, [by_digest[r.digest] for r in plan_runs({**shared, **cell.settings})])
            for cell in cells
        ]


def chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Those with one of these words in their names."""
    names = set(chosen_names([cell.name for cell in cells], only))
    return [cell for cell in cells if cell.name in names]


def _row(cell: Cell, runs: Sequence[Row]) -> Row:
    """The figures of a cell: means over the seeds that have a result."""
    done = [run for run in runs if "failure" not in run]
    row: Row = {
        "line": cell.line,
        "column": cell.column,
        "published": cell.published,
        "settings": dict(cell.settings),
        "seeds": len(done),
    }
    failures = sorted({run["failure"] for run in runs if "failure" in run})
    if failures:
        row["failures"] = failures
    if not done:
        return row
    scores = [100 * run["test_accuracy"] for run in done]
    row["accuracy"] = round(mean(scores), 3)
    row["deviation"] = round(stdev(scores), 3) if len(scores) > 1 else None
    for name in _SUM:
        row[name] = mean(run[name] for run in done)
    row["virtual_times_s"] = {
        where: mean(run["virtual_times_s"][where] for run in done)
        for where in done[0]["virtual_times_s"]
    }
    row["steps"] = done[0]["steps"]
    row["kernels"], row["versions"] = done[0]["kernels"], done[0]["versions"]
    return row


def accuracy_text(row: Row | None) -> str:
    """Accuracy in per cent, with the deviation over seeds; "-" where nothing was run."""
    if row is None:
        return "-"
    if "accuracy" not in row:
        return row["failures"][0].partition(":")[0]
    text = f"{row['accuracy']:.2f}"
    return text if row["deviation"] is None else f"{text} ± {row['deviation']:.2f}"


def by_place(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """Rows by line and column; of several the last."""
    return {(row["line"], row["column"]): row for row in rows}
