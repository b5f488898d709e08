"""Where output goes: results to standard output, progress to standard error.

Progress is a bar on a terminal, plain lines otherwise.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradwire.experiment.report.comparison import format_seconds
from gradwire.experiment.report.score import format_score, score_name
from gradwire.warning import GradwireWarning

if TYPE_CHECKING:
    from gradwire.experiment.run.record import Row

errors = Console(stderr=True)
out = Console()
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]


class Meter:
    """Progress of one run at a time, on standard error."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(),
            console=errors,
        )
        self._terminal = errors.is_terminal

    def __enter__(self) -> Meter:
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._bar.stop()

    def follow(self, name: str) -> Any:
        """A progress callback for the run of this name."""
        if self._terminal:
            task = self._bar.add_task(name, total=None, score="")

            def advance(row: Row, steps: int) -> None:
                score = format_score(row)
                self._bar.update(task, completed=row["step"], total=steps, score=score)

            return advance

        def line(row: Row, steps: int) -> None:
            kind = "time" if "time_s" in row else "virtual time"
            seconds = row["time_s" if "time_s" in row else "virtual_time_s"]
            write_line(
                f"{name}: step {row['step']}/{steps}, test {score_name(row)} "
                f"{format_score(row)}, {kind} {format_seconds(seconds)}"
            )

        return line


def write_line(text: str) -> None:
    """To standard error, in one call: Ctrl-C may come before or after it, not before its end."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callback that shows on standard error what is measured."""
    with errors.status("") as status:  # shows nothing without a terminal

        def progress(what: str, done: int, total: int) -> None:
            status.update(f"{done}/{total} {escape(what)}")
            if not errors.is_terminal and what:
                write_line(f"{done + 1}/{total} {what}")

        yield progress


class WarningPrinter:
    """Replaces `warnings.showwarning`: prints each warning of this package once, in one line."""

    def __init__(self, others: Callable[..., None]) -> None:
        self._others = others  # prints warnings of other packages
        self._printed: set[str] = set()

    def __call__(
        self, message: Warning | str, category: type[Warning], *where: Any, **more: Any
    ) -> None:
        text = str(message)
        if not issubclass(category, GradwireWarning):
            self._others(message, category, *where, **more)
        elif text not in self._printed:
            self._printed.add(text)
            errors.print(
                f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True
            )


def new_folder(kind: str) -> Path:
    return Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
