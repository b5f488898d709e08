"""`gradwire rd`: rate and distortion of polar codes."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gradwire.cli.console import out, show_progress
from gradwire.experiment.studies.defaults import RD_LENGTHS, RD_RATES

# Those of coding/polar/construction.py, which imports torch.
Construction = Literal[
    "monte_carlo", "tal_vardy", "gaussian_approximation", "bhattacharyya", "polarization_weight"
]


@dataclass(frozen=True)
class RDCommand:
    """Rate and distortion of polar codes on random bits, next to Shannon's bound.

    Every combination of the values given is measured; lists go with hard decisions only.
    """

    n: tuple[int, ...] = RD_LENGTHS
    """Block lengths, powers of two."""
    rate: tuple[float, ...] = RD_RATES
    """Bits sent per bit."""
    blocks: int | None = None
    """Blocks per code; by default as many as make two million bits."""
    decision: tuple[Literal["hard", "randomized"], ...] = ("hard", "randomized")
    """How a bit is decided: the likelier value, or drawn as likely as it is (with the exact f)."""
    construction: tuple[Construction, ...] = ("monte_carlo",)
    """How the free positions are found. tal_vardy takes 4 s at N = 8192, minutes at 2^19."""
    list_size: tuple[int, ...] = (1,)
    """Candidate codewords, up to 32. More take longer; other than 2, 4, 8 .. much longer."""
    seed: int = 0
    """Of the random bits."""
    figure: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """Draw the figure into this file, in a folder that exists: .png, .pdf or .svg."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        from gradwire.experiment.studies.rd import measure, rd_figure, rd_tables

        if self.figure is not None:
            _check_figure(self.figure)
        with show_progress() as progress:
            measured = measure(
                self.n,
                self.rate,
                self.blocks,
                self.decision,
                self.construction,
                self.list_size,
                self.seed,
                progress,
            )
        if self.figure is not None:
            rd_figure(measured, self.figure)
        if self.json:
            print(json.dumps(measured))
            return
        out.print(
            "Share of random bits that are wrong after decoding, if R bits are sent for each."
        )
        for table in rd_tables(measured):
            out.print(table)
        out.print("bound: Shannon's D(R). In brackets: standard error, in units of the last digit.")
        if self.figure is not None:
            out.print(f"Figure: {self.figure}", soft_wrap=True)


def _check_figure(path: Path) -> None:
    """Refuses a path that cannot be written, before minutes of measuring."""
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--figure takes a .png, .pdf or .svg file, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--figure: there is no folder {path.parent}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--figure: {path} cannot be written")
