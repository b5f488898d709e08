"""The thesis's rate-distortion table (sec. 3.2.2), and block lengths up to those of the theory.

Korada and Urbanke 2010 ("Polar codes are optimal for lossy source coding", fig. 3) show how the
distortion of successive cancellation falls towards Shannon's bound with the block length, from 2^9
on. Here hard decisions with the codec's integers, up to 2^19.
"""

from collections.abc import Sequence

from gradwire.experiment.repro.recipe import Means, Recipe, Row
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table
from gradwire.experiment.studies.defaults import RD_RATES
from gradwire.experiment.studies.rd import measure, table_rows

_THESIS_LENGTHS = (256, 512, 1024, 2048)
_LENGTHS: dict[Scale, Sequence[int]] = {
    "smoke": (256, 512),
    "small": (*_THESIS_LENGTHS, 8192, 1 << 15),
    "full": (*_THESIS_LENGTHS, *(1 << m for m in (9, 12, 13, 14, 15, 16, 17, 18, 19))),
}
_BLOCKS: dict[Scale, int | None] = {"smoke": 64, "small": None, "full": None}


class ThesisRD(Recipe):
    name = "thesis-rd"
    title = "Thesis, sec. 3.2.2: rate and distortion of polar codes on random bits"
    choices = (
        "The thesis names no construction; here free positions are found by "
        "simulation, and two million bits are coded for each figure. In brackets the standard "
        "error, in units of the last digit."
    )

    def measure(self, means: Means) -> list[Row]:
        lengths = sorted(set(_LENGTHS[means.scale]))
        found = measure(lengths, RD_RATES, _BLOCKS[means.scale])
        return [
            {"line": f"N = {row['n']}", "column": f"R = {row['rate']:g}", **row}
            for row in found["rows"]
        ]

    def tables(self, rows: Sequence[Row]) -> list[Table]:
        rates = sorted({row["rate"] for row in rows})
        lines, length = [], ""
        for n, name, cells in table_rows(rows, rates) if rows else ():
            length = n or length
            label = "Shannon's bound" if name == "bound" else name.replace("hard", "ours")
            lines.append([length, label, *cells])
        head = ["N", "", *(f"R = {rate:g}" for rate in rates)]
        return [Table(self.title, head, lines, num_words=2)]


RECIPES = (ThesisRD(),)
