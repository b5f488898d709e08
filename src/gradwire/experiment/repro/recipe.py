"""What a recipe is: a published table, how its figures are measured, and the tables that result.

Rows of results are values of JSON, one for each figure that was measured. Tables are made of rows
alone, of as many as there are: so those of several runs, from several machines, make one table.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gradwire.core.notation import unknown_name
from gradwire.experiment.repro.scale import Scale
from gradwire.experiment.repro.table import Table

Row = dict[str, Any]  # "line" and "column" say of which figure; the rest is the recipe's


@dataclass(frozen=True)
class Means:
    """What a recipe may use, and where its records go."""

    folder: Path  # of this recipe at this scale
    scale: Scale
    device: str = "cpu"
    jobs: int | None = None  # runs at a time; None: as cores and memory allow
    only: tuple[str, ...] = ()  # cells that have one of these words in their names; all if empty
    seeds: int = 0  # of each cell; 0: as many as the scale has
    watcher: Any = None  # of sweeps
    say: Callable[[str], None] = print


class Recipe(ABC):
    """A published result to be measured again."""

    name: str  # on the command line
    title: str
    choices: str = ""  # what the source leaves open, and what is taken here

    @abstractmethod
    def measure(self, means: Means) -> list[Row]:
        """Measures what is not there yet, and returns the rows of all that is there."""

    @abstractmethod
    def tables(self, rows: Sequence[Row]) -> list[Table]:
        """The published figures with those measured, as far as there are any."""

    def draw(self, rows: Sequence[Row], folder: Path) -> list[Path]:
        """Draws figures into a folder, if there are some to draw."""
        return []


@cache
def recipes() -> dict[str, Recipe]:
    """All recipes by name: the modules of this folder with a list `RECIPES`.

    Those that begin with an underscore add algorithms and data, to processes of their recipe only.
    """
    found: dict[str, Recipe] = {}
    folder = importlib.import_module("gradwire.experiment.repro")
    for info in pkgutil.iter_modules(folder.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{folder.__name__}.{info.name}")
        for recipe in getattr(module, "RECIPES", ()):
            found[recipe.name] = recipe
    return dict(sorted(found.items()))


def find_recipe(name: str) -> Recipe:
    if name not in recipes():
        raise ValueError(unknown_name("recipe", name, list(recipes())))
    return recipes()[name]


def chosen_names(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Those of the names that contain one of the words; all if there are no words."""
    found = [name for name in names if not only or any(word in name for word in only)]
    if not found:
        raise ValueError(
            f"--only {' '.join(only)}: no cell has that in its name. There are "
            + "; ".join(names[:40])
        )
    return found
