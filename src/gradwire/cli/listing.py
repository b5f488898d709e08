"""`gradwire list`: all algorithms, one line each, or everything about one of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from gradwire.cli.console import out

_MIN_WIDTH_WITH_PAPERS = 100  # of the terminal, in columns
_MAX_EXAMPLE_WIDTH = 32  # in columns; longer ones are folded


@dataclass(frozen=True)
class ListCommand:
    """Every algorithm by dimension, with one line and, where there is room, its paper.

    `gradwire list NAME` prints everything about one: arguments, paper, examples, guarantee, file.
    NAME may be an expression such as "topk(0.01) >> qsgd(bits=4)".
    """

    name: Annotated[
        str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")
    ] = ""
    """Only this one, with all details."""
    json: bool = False
    """Print JSON."""

    def __call__(self) -> None:
        if self.name:
            self._show_one()
        else:
            self._show_all()

    def _show_one(self) -> None:
        from gradwire.cli.catalogue import about

        found = about(self.name)
        if self.json:
            print(json.dumps(found))
            return
        for number, entry in enumerate(found):
            if number:
                out.print()
            _print_entry(entry)

    def _show_all(self) -> None:
        from gradwire import data, kernels
        from gradwire.cli.catalogue import entries
        from gradwire.experiment.run.registries import REGISTRIES

        backend = kernels.backend()  # refuses a wrong GRADWIRE_KERNELS before anything is printed
        listed = entries()
        if self.json:
            print(json.dumps({"algorithms": listed, "data": data.names()}))
            return
        has_papers = out.width >= _MIN_WIDTH_WITH_PAPERS
        for kind in REGISTRIES:
            own = [entry for entry in listed if entry["dimension"] == kind]
            out.print(_table(kind, own, has_papers))
            out.print()
        if not has_papers:
            out.print(f"papers: on terminals of {_MIN_WIDTH_WITH_PAPERS} columns, or with --json")
        out.print(f"data: {', '.join(data.names())}")
        out.print(f"kernels: {backend}")


def _print_entry(entry: Mapping[str, Any]) -> None:
    out.print(Text(f"{entry['name']}: {entry['dimension']}", style="bold"))
    out.print(Padding(Text(entry["summary"]), (0, 0, 1, 0)))
    if entry["about"] != entry["summary"]:
        out.print(Padding(Text(entry["about"]), (0, 0, 1, 0)))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        ("write", entry["write"]),
        ("examples", "\n".join(entry["examples"])),
        ("properties", "\n".join(entry["properties"])),
        ("paper", entry["paper"]),
        ("file", entry["file"]),
        ("plugin", entry["plugin"]),
    ):
        if value:
            table.add_row(name, Text(value))
    out.print(table)


def _table(kind: str, entries: Sequence[Mapping[str, str]], has_papers: bool) -> Table:
    table = Table(title=kind, title_justify="left", box=None, header_style="dim")
    longest = max((len(entry["example"]) for entry in entries), default=0)
    width = min(longest, _MAX_EXAMPLE_WIDTH)
    table.add_column("write", overflow="fold", style="bold", min_width=width, max_width=width)
    table.add_column("what it does", overflow="fold", ratio=3)
    if has_papers:
        table.add_column("paper", overflow="fold", style="dim", ratio=2)
    for entry in entries:
        cells = [entry["example"], entry["summary"], entry["paper"]]
        table.add_row(*map(escape, cells[: len(table.columns)]))
    return table
