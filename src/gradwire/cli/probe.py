"""`gradwire probe`: measures the network between real ranks, and compares with the simulator."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.table import Table

from gradwire.cli.console import errors, out
from gradwire.cli.defaults import world_size
from gradwire.experiment.processes.launch.scratch import scratch_folder
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.run.config import Config
from gradwire.runtime.storage.files import write_atomically

if TYPE_CHECKING:
    from gradwire.experiment.processes.launch.signals import Signals

_STEPS = 100


@dataclass(frozen=True)
class ProbeCommand:
    """Measure latency, bandwidth, compute and coding between ranks, and predict their step time.

    Starts `--workers` ranks on this machine, or is one of torchrun's. Writes the network to a file
    for `gradwire run --config FILE`.
    """

    config: Config = field(default_factory=Config)
    methods: tuple[str, ...] = ("identity", "topk(0.01)", "sign")
    """Compression methods to run for real and to predict; none: only measure."""
    file: Path = Path("network.toml")
    """File for the measured settings."""
    json: bool = False
    """Print everything as JSON."""

    def __call__(self) -> None:
        from gradwire.cli.ending import say
        from gradwire.cli.processes import GRADWIRE
        from gradwire.experiment.processes.launch.launcher import launch
        from gradwire.experiment.studies.probe import num_skipped

        if self.config.workers < 2:
            raise ValueError("there is no network with one worker: give --workers 2 or more")
        if self.methods:
            num_skipped(self._steps)  # raises if there are too few
        if world_size() is not None:
            self._run_rank()
        with scratch_folder() as place:
            path = place / "config.toml"
            path.write_text(self.config.to_toml())
            options = ["--config", str(path), "--file", str(self.file)]
            options += ["--methods", *self.methods]
            options += ["--json"] if self.json else []
            command = [*GRADWIRE, "probe", *options]
            failure = launch(self.config.workers, lambda attempt: command, say=say)
        if failure is not None:
            say(f"error: {failure.message}" if failure.code < 128 else failure.message)
            sys.exit(failure.code)

    @property
    def _steps(self) -> int:
        """Steps of every method."""
        return self.config.steps or _STEPS

    def _run_rank(self) -> NoReturn:
        from gradwire.cli.ending import end_with

        rank = int(os.environ["RANK"])
        end_with(lambda signals: self._probe(rank, signals), lambda error: rank == 0)

    def _probe(self, rank: int, signals: Signals) -> None:
        from gradwire.experiment.processes.meeting import meet
        from gradwire.experiment.run.machine import backend_of
        from gradwire.experiment.studies.prediction import probe

        meet(60.0, backend=backend_of(self.config))

        def progress(what: str) -> None:
            if rank == 0:
                errors.print(f"measuring {what}", highlight=False)

        found = probe(self.config, self.methods, self._steps, progress)
        if rank:
            return
        write_atomically(self.file.absolute(), found.to_toml().encode())
        if self.json:
            print(json.dumps(found.to_dict()))
            return
        settings = found.settings
        out.print(
            f"{settings['workers']} ranks: latency {settings['latency']}, bandwidth "
            f"{settings['bandwidth']} when all exchange with all. `compute` is "
            f"{found.parts_of_compute}: {settings['compute']}. Coding takes "
            f"{settings['coding_slowdown']:.2f} times as long as on one rank alone."
            + ("" if found.processor is None else f" All share {settings['host']}."),
            highlight=False,
        )
        if found.predictions:
            table = Table(box=None)
            columns = ("method", "step, measured", "predicted", "error", "gradients", "coding")
            for name in columns:
                table.add_column(name, justify="left" if name == "method" else "right")
            for one in found.predictions:
                table.add_row(
                    one.compression,
                    format_seconds(one.measured_s),
                    format_seconds(one.predicted_s),
                    f"{100 * one.error:+.0f}%",
                    format_seconds(one.compute_s),
                    format_seconds(one.coding_s),
                )
            out.print(table)
        out.print(f"Written to {self.file}: gradwire run --config {self.file}", soft_wrap=True)
