"""`gradwire report`: one page of HTML about any number of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gradwire.cli.console import out


@dataclass(frozen=True)
class ReportCommand:
    """Make one page of HTML about runs, to look at in a browser: table, curves, Pareto front.

    The page needs no network, so it can be sent and opened anywhere. Runs of several folders are
    shown together, those of different tasks one task at a time.
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUNS...")]
    """Folders of runs, sweeps or comparisons, or folders that hold them."""
    out: Annotated[Path, tyro.conf.arg(aliases=("-o",), metavar="FILE.html")] = Path("report.html")
    """The page; an existing file is replaced."""
    title: str = ""
    """Heading of the page; by default the names of the folders."""

    def __call__(self) -> None:
        from gradwire.experiment.report.page import write_report

        if not self.runs:
            raise ValueError("give folders with runs: gradwire report runs/NAME -o report.html")
        page = write_report(self.runs, self.out, self.title)
        out.print(f"Report: {page}", soft_wrap=True, markup=False, highlight=False)
