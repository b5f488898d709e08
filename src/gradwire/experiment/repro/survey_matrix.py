"""Table 5 of the survey: what pairs of architecture and synchronization do, graded there, measured
here on a small network.

Consistency is the distance between the workers' models, frequency the messages of a step,
congestion the bytes of the busiest node, convergence the loss after the time of the fastest pair.
"""

from collections.abc import Sequence
from dataclasses import replace

from gradwire.core.units import format_bytes
from gradwire.experiment.repro.published import published
from gradwire.experiment.repro.recipe import Means, Recipe, Row
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table
from gradwire.experiment.studies.defaults import MATRIX_BASE
from gradwire.experiment.studies.matrix import measure, pairs

_ARCHITECTURES = {
    "PS": "parameter_server",
    "All-Reduce": "allreduce",
    "Gossip": "gossip(ring)",
}
_SYNCHRONIZATIONS = {
    "BSP-SGD": "bsp",
    "SSP-SGD": "ssp(3)",
    "ASP-SGD": "asp",
    "Local-SGD": "localsgd(8)",
}
_HEAD = (
    *("architecture", "synchronization", "consistency", "distance of models"),
    *("frequency", "messages /step", "congestion", "busiest node /step"),
    *("convergence", "loss at equal time"),
)
_STEPS: dict[Scale, int] = {"smoke": 20, "small": 200, "full": 1000}


class Table5(Recipe):
    name = "table5"
    title = "Table 5 of the survey: pairs of architecture and synchronization"
    choices = (
        "Grades are the survey's. Measured: 8 workers, digits, mlp((32,)), 100 Mbit/s, gradients "
        "of 10 ms that vary by 30%. Gossip that is asynchronous is AD-PSGD."
    )

    def measure(self, means: Means) -> list[Row]:
        base = replace(MATRIX_BASE, steps=_STEPS[means.scale], model="mlp((32,))")
        chosen = pairs(list(_SYNCHRONIZATIONS.values()), list(_ARCHITECTURES.values()))
        asynchronous = pairs(["asp"], ["gossip(ring, adpsgd)"])
        rows = measure([*chosen, *asynchronous], base)
        return [{"line": r["architecture"], "column": r["synchronization"], **r} for r in rows]

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        found = {(row["line"], row["column"]): row for row in rows}
        lines = []
        for line in published("table5"):
            place = _ARCHITECTURES[line["architecture"]], _SYNCHRONIZATIONS[line["synchronization"]]
            row = found.get(place)
            if place == ("gossip(ring)", "asp"):  # a notation of its own
                row = found.get(("gossip(ring, algorithm=adpsgd)", "asp"), row)
            if row is not None:
                lines.append([line["architecture"], line["synchronization"], *_cells(line, row)])
        return [Table(self.title, _HEAD, lines, num_words=2)]


def _cells(line: dict[str, str], row: Row) -> list[str]:
    grades = [line[name] for name in ("consistency", "frequency", "congestion", "convergence")]
    if "loss" not in row:
        figures = ["-"] * 4
    else:
        distance = row["distance"]
        figures = [
            "-" if distance is None else f"{distance:.3g}",
            f"{row['messages_per_step']:.3g}",
            format_bytes(row["busiest_node_bytes_per_step"]),
            f"{row['loss_after_equal_time']:.3f}",
        ]
    return [text for pair in zip(grades, figures) for text in pair]


RECIPES = (Table5(),)
