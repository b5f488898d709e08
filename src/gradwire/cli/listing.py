"""`gradwire list`: what can be written."""

import json
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gradwire import data, kernels
from gradwire.architecture.gossip import GOSSIP
from gradwire.architecture.graphs import GRAPHS
from gradwire.cli.console import out
from gradwire.core.notation import Registry
from gradwire.experiment.setup import DIMENSIONS, MODELS, OPTIMIZERS, PARTITIONS, SCHEDULES
from gradwire.runtime.compute_time import COMPUTE_TIME, STRAGGLERS
from gradwire.runtime.faults import FAULTS

KINDS: dict[str, Registry[Any]] = {
    **DIMENSIONS,
    "graph": GRAPHS,
    "gossip algorithm": GOSSIP,
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "partition": PARTITIONS,
    "compute": COMPUTE_TIME,
    "stragglers": STRAGGLERS,
    "fault": FAULTS,
}


@dataclass(frozen=True)
class ListCommand:
    """Every algorithm by dimension, with one line and its paper."""

    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        entries = [
            {
                "dimension": kind,
                "name": name,
                "example": (registry[name].examples or (name,))[0],
                "summary": registry[name].summary(),
                "paper": registry[name].paper,
            }
            for kind, registry in KINDS.items()
            for name in registry.names()
        ]
        if self.json:
            print(json.dumps({"algorithms": entries, "data": data.names()}))
            return
        for kind in KINDS:
            table = Table(title=kind, title_justify="left", box=None, header_style="dim")
            table.add_column("write", no_wrap=True, style="bold")
            table.add_column("what it does")
            table.add_column("paper", style="dim")
            for entry in entries:
                if entry["dimension"] == kind:
                    table.add_row(entry["example"], entry["summary"], entry["paper"])
            out.print(table)
            out.print()
        out.print(f"data: {', '.join(data.names())}")
        out.print(f"kernels: {kernels.backend()}")
