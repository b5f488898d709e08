"""A process of a sweep: it reads runs from its standard input, and reports on its standard output.

Both are lines of JSON. A task has the folder of a run and its settings; a report is a row of
metrics, or how the run ended. What is printed meanwhile, by code of the user as well, goes to
standard error.
"""

import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from gradwire.core.errors import DataError, StoppedError, WhatIfError
from gradwire.experiment.processes.launch.children import die_with_parent
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.given import NOTHING
from gradwire.experiment.run.outcome import Progress
from gradwire.experiment.run.record import Record, Row
from gradwire.experiment.simulate.simulation import resume, simulate_given
from gradwire.experiment.studies.compare import failure, folder_name
from gradwire.experiment.sweep.results import ELSEWHERE, write_failure

Report = Callable[[dict[str, Any]], None]


def task_line(folder: Path, config: Config, imports: Sequence[str] = ()) -> str:
    """What `serve` reads. `imports`: modules whose algorithms the configuration may name."""
    task = {"folder": str(folder), "config": asdict(config), "imports": list(imports)}
    return json.dumps(task) + "\n"


def serve(tasks: TextIO, reports: TextIO) -> None:
    """Runs one task after the other until there is no more."""

    def report(values: dict[str, Any]) -> None:
        reports.write(json.dumps(values) + "\n")
        reports.flush()

    for line in tasks:
        task = json.loads(line)
        for module in task["imports"]:
            importlib.import_module(module)
        folder, config = Path(task["folder"]), Config.from_dict(task["config"])
        report({"ended": _ended(folder, config, report)})


def _ended(folder: Path, config: Config, report: Report) -> str:
    """Runs an experiment and returns why it has no result; "" if it has one."""

    def progress(row: Row, steps: int) -> None:
        report({"step": row["step"], "steps": steps})

    try:
        run_into(folder, config, progress)
    except (StoppedError, ValueError) as error:
        write_failure(folder, config, failure(error))
        return failure(error)
    except (DataError, OSError) as error:  # may be gone next time
        return f"failed: {error}"
    except Exception as error:
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}"
    return ""


def run_into(folder: Path, config: Config, progress: Progress | None = None) -> None:
    """Runs or resumes an experiment, and leaves its record in the folder.

    If the messages of a method depend on the network, it trains once on each of `what_if`.
    """
    if not _is_alone(folder, config):
        try:
            _run_once(folder, config, progress)
            return
        except WhatIfError:
            shutil.rmtree(folder)
    alone = replace(config, what_if=())
    _run_once(folder, alone, progress)
    for bandwidth in config.what_if:
        if bandwidth != config.bandwidth:
            other = folder / ELSEWHERE / folder_name(bandwidth)
            _run_once(other, replace(alone, bandwidth=bandwidth), progress)


def _is_alone(folder: Path, config: Config) -> bool:
    """Whether it was found before that the run must be done once for each network."""
    record = Record(folder)
    return bool(config.what_if) and record.exists and not record.config.what_if


def _run_once(folder: Path, config: Config, progress: Progress | None) -> None:
    record = Record(folder)
    if not record.exists:
        simulate_given(config, NOTHING, folder, progress)
    elif not record.is_finished:
        resume(folder, progress, restart=True)


def main() -> None:
    die_with_parent()
    # The end of standard output belongs to reports alone.
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, reports)


if __name__ == "__main__":
    main()
