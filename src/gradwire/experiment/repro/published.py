"""The published figures, as transcribed."""

import csv
from functools import cache
from importlib.resources import files

Line = dict[str, str]


@cache
def published(name: str) -> tuple[Line, ...]:
    """The lines of a table, by its file in `published/`; a cell that is empty is ""."""
    text = files("gradwire.experiment.repro").joinpath("published", f"{name}.csv").read_text()
    return tuple(csv.DictReader(text.splitlines()))


def percent(text: str) -> float | None:
    """A figure in per cent, perhaps with a deviation behind it."""
    return float(text.partition("+")[0]) if text else None
