"""`gradwire list`: what can be written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
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
_WIDE = 100  # columns with room for papers
_EXAMPLE = 32  # columns; longer ones are folded


@dataclass(frozen=True)
class ListCommand:
    """Every algorithm by dimension, with one line and, where there is room, its paper."""

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
        has_papers = out.width >= _WIDE
        for kind in KINDS:
            own = [entry for entry in entries if entry["dimension"] == kind]
            out.print(_table(kind, own, has_papers))
            out.print()
        if not has_papers:
            out.print(f"papers: where there are {_WIDE} columns, or with --json")
        out.print(f"data: {', '.join(data.names())}")
        out.print(f"kernels: {kernels.backend()}")


def _table(kind: str, entries: Sequence[Mapping[str, str]], has_papers: bool) -> Table:
    table = Table(title=kind, title_justify="left", box=None, header_style="dim")
    longest = max((len(entry["example"]) for entry in entries), default=0)
    width = min(longest, _EXAMPLE)
    table.add_column("write", overflow="fold", style="bold", min_width=width, max_width=width)
    table.add_column("what it does", overflow="fold", ratio=3)
    if has_papers:
        table.add_column("paper", overflow="fold", style="dim", ratio=2)
    for entry in entries:
        cells = [entry["example"], entry["summary"], entry["paper"]]
        table.add_row(*map(escape, cells[: len(table.columns)]))
    return table
