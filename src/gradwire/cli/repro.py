"""`gradwire repro`: published tables, measured again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gradwire.cli.console import Folder, out
from gradwire.cli.ending import say, stopping
from gradwire.cli.sweep import Meter
from gradwire.experiment.repro.scale import Scale


@dataclass(frozen=True)
class ReproCommand:
    """Measure a published table again, and show both side by side.

    Without a name the recipes are listed. Cells that are done in the folder are not done again; the
    same command continues what was interrupted.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """A recipe, such as thesis-mnist or survey-table8."""
    scale: Scale = "smoke"
    """smoke: whether it works, in minutes on two cores. small: an hour. full: the whole table, for
    which a GPU is needed."""
    device: str = "cpu"
    """Where gradients are evaluated: cpu, cuda."""
    only: tuple[str, ...] = ()
    """Only cells with one of these words in their names, such as eftopk "lr=0.1"."""
    seeds: int = 0
    """Of each cell; 0: as many as the scale has."""
    jobs: int = 0
    """How many runs at a time; 0: as cores and memory allow."""
    out: Folder = None
    """Folder for the records; by default runs/repro/NAME-SCALE."""
    resume: bool = True
    """Continue what is in the folder. With --no-resume it must be empty."""
    keep: Folder = None
    """Keep the results as lines in NAME.jsonl in this folder, too, with hardware and commit."""
    json: bool = False
    """Print the results as JSON."""

    def __call__(self) -> None:
        from gradwire.experiment.repro.kept import keep, origin
        from gradwire.experiment.repro.recipe import Means, find_recipe, recipes

        if not self.name:
            for recipe in recipes().values():
                out.print(f"{recipe.name:16} {recipe.title}", markup=False, soft_wrap=True)
            return
        recipe = find_recipe(self.name)
        folder = self.out or Path("runs") / "repro" / f"{self.name}-{self.scale}"
        if not self.resume and folder.exists() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty. Choose another --out, or leave out --no-resume to continue"
            )
        advice = f"interrupted; to continue: gradwire repro {self.name} --scale {self.scale}"
        with stopping(lambda: advice), Meter() as meter:
            means = Means(
                folder,
                self.scale,
                self.device,
                self.jobs or None,
                self.only,
                self.seeds,
                meter,
                say,
            )
            rows = recipe.measure(means)
        if self.keep is not None:
            keep(self.keep / f"{self.name}.jsonl", self.scale, rows, origin(self.device))
        if self.json:
            print(json.dumps(rows))
            return
        for table in recipe.tables(rows):
            out.print(table.rich())
            for note in table.notes:
                out.print(note, markup=False, soft_wrap=True)
        for path in recipe.draw(rows, folder):
            out.print(f"Figure: {path}", soft_wrap=True)
        if recipe.choices:
            out.print(recipe.choices.replace("\n", " "), markup=False)
        out.print(f"Records: {folder}", soft_wrap=True)
