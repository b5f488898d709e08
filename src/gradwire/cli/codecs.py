"""`gradwire codecs`: bits, error and speed of every codec."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gradwire.cli.console import out, show_progress
from gradwire.experiment.studies.defaults import CODECS_NUMEL


@dataclass(frozen=True)
class CodecsCommand:
    """Bits, error and speed of every codec, on drawn vectors and on saved gradients."""

    only: tuple[str, ...] = ()
    """Measure these alone: names such as topk, or expressions such as "topk(0.1) >> fp16"."""
    numel: int = CODECS_NUMEL
    """Length of the drawn vectors."""
    json: bool = False
    """Print JSON."""
    costs: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Measure instead what coding costs here, for --coding-costs; about five minutes on a quiet
    machine. With --only these codecs alone: the rest stays as in the file, or as in gradwire's."""

    def __call__(self) -> None:
        if self.costs is not None:
            from gradwire.experiment.costs.calibration import write_costs

            with show_progress() as progress:
                found = write_costs(self.costs, self.only, progress)
            out.print(f"Costs of coding: {self.costs}", soft_wrap=True)
            for worst in found["worst"]:
                out.print(f"Off by the largest factor, {worst['factor']}: {worst['entry']}")
            return
        from gradwire import kernels
        from gradwire.experiment.studies.codecs import codecs_tables, measure

        with show_progress() as progress:
            measured = measure(self.only, self.numel, progress)
        if self.json:
            print(json.dumps(measured))
            return
        for table in codecs_tables(measured):
            out.print(table)
        out.print("/copy: time over a memcpy of the same vector; one thread, best of a few.")
        out.print(f"kernels: {kernels.backend()}")
