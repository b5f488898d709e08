"""Processes that do the runs of a sweep, a few at a time.

Each does one run after the other, so that what it has imported and compiled serves them all. One
that is killed, perhaps for want of memory, costs the run that it had; another takes its place.
"""

import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gradwire.experiment.processes.launch.children import PARENT, describe_deaths
from gradwire.experiment.run.config import Config
from gradwire.experiment.sweep.plan import PlannedRun
from gradwire.experiment.sweep.worker import task_line
from gradwire.training.evaluation.side_by_side import CORES_VARIABLE

_COMMAND = (sys.executable, "-m", "gradwire.experiment.sweep.worker")
_RUN_NBYTES = 1 << 30  # of memory that a process may need
_TAIL = 20  # lines

OnStep = Callable[[PlannedRun, int, int], None]  # the run, its step, its steps in all
OnEnd = Callable[[PlannedRun, str], None]  # the run, and why it has no result


def default_jobs(threads: int) -> int:
    """How many runs with so many threads each go at a time, by cores and free memory."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(cores // max(1, threads), _free_nbytes() // _RUN_NBYTES))


def _free_nbytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(line for line in lines if line.startswith("MemAvailable:"))
        return 1024 * int(free.split()[1])
    except (OSError, StopIteration):
        return sys.maxsize  # not known on this system


def _environment() -> dict[str, str]:
    # The other cores have other runs.
    cores = os.environ.get(CORES_VARIABLE, "1")
    return os.environ | {PARENT: str(os.getpid()), CORES_VARIABLE: cores}


class _Process:
    """A process and the run that it has."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.run: PlannedRun | None = None
        self._unread = b""
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the sweep
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tasks: IO[bytes] = self._process.stdin
        self.reports: IO[bytes] = self._process.stdout

    def start(self, run: PlannedRun, folder: Path, config: Config, imports: Sequence[str]) -> None:
        self.run = run
        with suppress(BrokenPipeError):  # it was killed; its reports end, too
            self._tasks.write(task_line(folder, config, imports).encode())
            self._tasks.flush()

    def read(self) -> list[dict[str, Any]] | None:
        """Reports that have arrived; None: there will be no more."""
        data = os.read(self.reports.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def death(self) -> str:
        """Describes how it ended, with the last lines that it wrote."""
        code = self._process.wait()
        text = describe_deaths({0: code}, lambda _: "its process") or "its process ended"
        tail = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        return "\n".join([text, *tail])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._tasks.close()
        self.reports.close()


def run_all(
    runs: Sequence[PlannedRun],
    folder_of: Callable[[PlannedRun], Path],
    jobs: int,
    logs: Path,
    config_of: Callable[[PlannedRun], Config],
    on_step: OnStep,
    on_end: OnEnd,
    imports: Sequence[str] = (),
) -> None:
    """Does all runs, at most `jobs` at a time. What a process prints goes to a file in `logs`.

    `config_of`: what a run is done with, where that is not what it was planned with. `imports`:
    modules that each process imports before its first run.
    """
    waiting = deque(runs)
    selector = selectors.DefaultSelector()

    def add(number: int) -> None:
        process = _Process(logs / f"process-{number}.log")
        selector.register(process.reports, selectors.EVENT_READ, (number, process))
        following(process)

    def following(process: _Process) -> None:
        if waiting:
            run = waiting.popleft()
            process.start(run, folder_of(run), config_of(run), imports)
        else:
            process.run = None
            selector.unregister(process.reports)
            process.kill()

    def take(number: int, process: _Process) -> None:
        run = process.run
        assert run is not None
        reports = process.read()
        if reports is None:
            selector.unregister(process.reports)
            on_end(run, f"stopped: {process.death()}")
            process.kill()
            if waiting:
                add(number)
            return
        for report in reports:
            if "ended" in report:
                on_end(run, report["ended"])
                following(process)
            else:
                on_step(run, report["step"], report["steps"])

    try:
        for number in range(min(jobs, len(waiting))):
            add(number)
        while selector.get_map():
            for key, _ in selector.select():
                take(*key.data)
    finally:
        for key in list(selector.get_map().values()):
            key.data[1].kill()
        selector.close()
