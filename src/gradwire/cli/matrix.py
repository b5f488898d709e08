"""`gradwire matrix`: every pair of synchronization and architecture, measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from gradwire.cli.console import out, show_progress
from gradwire.core.units import format_bytes
from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.studies.defaults import MATRIX_BASE as BASE

if TYPE_CHECKING:
    from gradwire.experiment.run.record import Row


@dataclass(frozen=True)
class MatrixCommand:
    """Train every pair of synchronization and architecture for a few steps, and measure it.

    This is Table 5 of the survey (Tang et al. 2020) with figures instead of grades.
    """

    synchronization: tuple[str, ...] = ()
    """Only these; by default all."""
    architecture: tuple[str, ...] = ()
    """Only these; by default all."""
    compression: str = BASE.compression
    """What travels."""
    workers: int = BASE.workers
    """Number of workers."""
    steps: int = BASE.steps
    """Training steps of each pair."""
    bandwidth: str = BASE.bandwidth
    """Of each node's network card."""
    seed: int = BASE.seed
    """Of every random draw."""
    refused: bool = False
    """Also print why the other pairs make no sense."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        from gradwire.experiment.costs.coding_costs import charge_of, describe_charge
        from gradwire.experiment.studies.matrix import measure, pairs

        base = replace(
            BASE,
            compression=self.compression,
            workers=self.workers,
            steps=self.steps,
            bandwidth=self.bandwidth,
            seed=self.seed,
        )
        with show_progress() as progress:
            rows = measure(pairs(self.synchronization, self.architecture), base, progress)
        if self.json:
            print(json.dumps(rows))
            return
        out.print(
            f"{base.workers} workers, mlp on digits, {base.steps} steps of batch "
            f"{base.batch_size}, 1 seed, {base.compression}, {base.bandwidth}, {base.latency}, "
            f"gradients take {base.compute} s, coding time is "
            f"{describe_charge(charge_of(base).record)}.",
            soft_wrap=True,
            markup=False,
        )
        out.print(_table(rows))
        out.print(_legend(rows), soft_wrap=True)
        for row in rows:
            if "failure" in row:
                pair = f"{row['synchronization']} on {row['architecture']}"
                out.print(f"{pair} {row['failure']}", markup=False, soft_wrap=True)
        if self.refused:
            for reason in dict.fromkeys(row["refusal"] for row in rows if "refusal" in row):
                out.print(reason, markup=False, soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold", max_width=28)
    for name in (
        "model\ndist.",
        "msgs /\nstep",
        "bytes /\nstep",
        "busiest\nnode",
        "time /\nstep",
        "loss at\neq.time",
        "loss\nat end",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (architecture, own) in enumerate(groupby(rows, lambda row: row["architecture"])):
        if number:
            table.add_section()
        table.add_row(escape(architecture), style="bold")
        refused = []
        for row in own:
            if "refusal" in row:
                refused.append(row["synchronization"])
                continue
            if "failure" in row:
                kind = row["failure"].partition(":")[0]
                table.add_row(f"  {escape(row['synchronization'])}", kind)
                continue
            table.add_row(
                f"  {escape(row['synchronization'])}",
                _figure(row["distance"], 2),
                f"{row['messages_per_step']:.4g}",
                format_bytes(row["bytes_per_step"]),
                format_bytes(row["busiest_node_bytes_per_step"]),
                format_seconds(row["time_per_step_s"]),
                _figure(row["loss_after_equal_time"], 3),
                _figure(row["loss"], 3),
            )
        if refused:
            table.add_row(f"  {escape(', '.join(refused))}", *["-"] * 7, style="dim")
    return table


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _legend(rows: Sequence[Row]) -> str:
    refused = "-: pairs that make no sense; --refused says why."
    equal = next((row["equal_time_s"] for row in rows if "equal_time_s" in row), None)
    if equal is None:
        return refused
    return (
        "model dist.: root mean square distance of the workers' models to their mean, mean over "
        "the steps. busiest node: bytes sent and received by the node with most of them, per step. "
        f"eq.time: {format_seconds(equal)}, what the fastest pair took for all its steps. {refused}"
    )
