"""A table of a recipe, on a terminal and in a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Texts. The first `num_words` columns are words, the others figures."""

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    num_words: int = 1
    notes: Sequence[str] = ()

    def rich(self) -> RichTable:
        from rich import box
        from rich.markup import escape
        from rich.table import Table as RichTable

        table = RichTable(
            title=escape(self.title),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            header_style="bold",
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for number, name in enumerate(self.head):
            if number < self.num_words:
                table.add_column(escape(name), overflow="fold", min_width=8)
            else:
                table.add_column(escape(name.replace(" ", "\n")), justify="right", no_wrap=True)
        for line in self.lines:
            table.add_row(*map(escape, line))
        return table

    def markdown(self) -> str:
        sides = "---|" * self.num_words + "---:|" * (len(self.head) - self.num_words)
        lines = [
            f"| {' | '.join(_cell(text) for text in line)} |" for line in (self.head, *self.lines)
        ]
        parts = [f"**{self.title}**", "", lines[0], f"|{sides}", *lines[1:]]
        return "\n".join([*parts, *(f"\n{note}" for note in self.notes)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
