"""The processes of a run that a launcher started, and their reports of why they failed.

A process that fails writes a report (a small JSON file), so that the first cause is shown, once.
The processes are killed when the launcher ends, however it ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.experiment.processes.launch.signals import Interrupted, held
from gradwire.runtime.storage.files import write_atomically

_REPORT, PARENT = "GRADWIRE_REPORT", "GRADWIRE_PARENT"
_NUM_TAIL_LINES = 20  # shown of the output of a rank that ended without a report
WRONG, LOST = 2, 3  # exit codes: the settings are wrong; a rank was lost


class Failure(NamedTuple):
    """Why ranks failed: a message, the exit code, and whether another attempt may help."""

    message: str
    code: int
    may_retry: bool


class Children:
    """The processes, by rank. The rank `shown` (None: all) writes to the launcher's output; the
    last lines of another rank are shown if it ends without a report."""

    def __init__(
        self,
        place: Path,
        size: int,
        shown: int | None = 0,
        name: Callable[[int], str] = lambda rank: f"rank {rank}",
    ) -> None:
        self.name = name
        self._place = place
        self._shown = shown
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.size = size

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: dict[str, str],
        files: Sequence[int] = (),
    ) -> None:
        """Starts a process, perhaps instead of one that has ended. It inherits these files."""
        own = {PARENT: str(os.getpid()), _REPORT: str(self._report(rank))}
        self._report(rank).unlink(missing_ok=True)
        _joined_path(self._report(rank)).unlink(missing_ok=True)
        is_shown = self.is_shown(rank)
        with self._output(rank).open("wb") as output, held():
            self._processes[rank] = subprocess.Popen(
                command,
                env=environment | own,
                stdin=subprocess.DEVNULL,
                stdout=None if is_shown else output,
                stderr=None if is_shown else output,
                pass_fds=files,
                start_new_session=True,  # the launcher forwards signals of a terminal
            )

    def poll(self) -> list[int | None]:
        """Exit codes. None: it runs; negative: it was killed by a signal."""
        return [self._processes[rank].poll() for rank in range(self.size)]

    def code(self, rank: int) -> int | None:
        """The exit code of a process; None: it runs."""
        return self._processes[rank].poll()

    def signal(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Sends a signal to the processes that run, or to some of them."""
        for rank, process in self._processes.items():
            if process.poll() is None and (ranks is None or rank in ranks):
                _signal_group(process, number)

    def kill(self) -> None:
        """Also processes that others have started and left behind, as a shell does."""
        for process in self._processes.values():
            _signal_group(process, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def report(self, rank: int) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self._report(rank).read_text())
            return found
        return None

    def has_joined(self, rank: int) -> bool:
        """Whether it has called `report_joined`."""
        return _joined_path(self._report(rank)).exists()

    def address(self, rank: int) -> tuple[str, int] | None:
        """What it has reported with `report_address`."""
        with contextlib.suppress(OSError, ValueError):
            address, port = json.loads(_address_path(self._report(rank)).read_text())
            return address, port
        return None

    def holds_model(self, rank: int) -> bool:
        """Whether it has called `report_model`."""
        return _model_path(self._report(rank)).exists()

    def gone(self, rank: int) -> list[int]:
        """What it has reported with `report_gone`."""
        with contextlib.suppress(OSError, ValueError):
            found: list[int] = json.loads(_gone_path(self._report(rank)).read_text())
            return found
        return []

    def is_shown(self, rank: int) -> bool:
        return self._shown in (rank, None)

    def tail(self, rank: int) -> str:
        lines = self._output(rank).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_NUM_TAIL_LINES:])

    def _report(self, rank: int) -> Path:
        return self._place / f"report-{rank}.json"

    def _output(self, rank: int) -> Path:
        return self._place / f"output-{rank}"


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> None:
    """To the process and all that it has started: it leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None or not _exists(process.pid):
            os.killpg(process.pid, number)


def _exists(pid: int) -> bool:
    """Of a process that has ended: whether another one has its number. None has while processes
    that it started are there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def failure_of(
    children: Children, codes: Sequence[int | None], first: int | None, forwarded: int
) -> Failure:
    """The first cause. `first` is the rank that ended first, `forwarded` the signal, if any."""
    reports = {rank: children.report(rank) for rank in range(len(codes))}
    reported = {rank: report for rank, report in reports.items() if report is not None}
    # The report of the coordinator has most details.
    order = sorted(reported, key=lambda rank: (not children.is_shown(rank), rank))
    stopped = [reported[rank] for rank in order if reported[rank]["kind"] == "signal"]
    if forwarded or (stopped and not any(r["kind"] == "error" for r in reported.values())):
        number = forwarded or stopped[0]["code"] - 128
        text = stopped[0]["message"] if stopped else str(Interrupted(number))
        return Failure(text, 128 + number, False)
    for kind in ("error", "lost"):  # the loss of another rank is a consequence
        for report in (reported[rank] for rank in order):
            if report["kind"] == kind:
                dead = (
                    describe_deaths(dict(enumerate(codes)), children.name) if kind == "lost" else ""
                )
                return Failure(
                    "\n".join(filter(None, [report["message"], dead])),
                    report["code"],
                    report["code"] != WRONG,
                )
    message = describe_deaths(dict(enumerate(codes)), children.name) or "the ranks did not end"
    if first is not None and not children.is_shown(first) and (tail := children.tail(first)):
        message += f"\nthe last lines of {children.name(first)}:\n{tail}"
    return Failure(message, LOST, True)


def ignore_running(codes: Sequence[int | None]) -> list[int | None]:
    """Exit codes in which processes that still run do not count as failed."""
    return [0 if code is None else code for code in codes]


def describe_deaths(codes: Mapping[int, int | None], name: Callable[[int], str]) -> str:
    """Describes the processes that ended without a report."""
    texts = []
    for rank, code in codes.items():
        if code is None:
            texts.append(f"{name(rank)} did not end and was killed")
        elif code < 0:
            texts.append(f"{name(rank)} was killed by {signal.Signals(-code).name}")
        elif code not in (0, WRONG, LOST):
            texts.append(f"{name(rank)} ended with exit code {code}")
    return "; ".join(texts)


# In a rank.


def is_launched() -> bool:
    """Whether a launcher of this package started this process."""
    return _REPORT in os.environ


def forget_launcher() -> None:
    """In a process that becomes another program: that program is no node of the launcher's."""
    for name in (_REPORT, PARENT):
        os.environ.pop(name, None)


def report(kind: str, message: str, code: int) -> None:
    """In a rank: reports why it failed."""
    content = json.dumps({"kind": kind, "message": message, "code": code})
    with contextlib.suppress(OSError):  # the launcher has ended
        write_atomically(Path(os.environ[_REPORT]), content.encode())


def report_joined() -> None:
    """In a rank: reports to the launcher that it has joined (the scheduler: that all have).

    From now on the ranks themselves notice if one is lost.
    """
    with contextlib.suppress(OSError):
        _joined_path(Path(os.environ[_REPORT])).touch()


def report_address(address: str, port: int) -> None:
    """In a scheduler: reports where it is, and the port of the workers' store."""
    with contextlib.suppress(OSError):
        path = _address_path(Path(os.environ[_REPORT]))
        write_atomically(path, json.dumps([address, port]).encode())


def report_model() -> None:
    """In a server: reports that it holds a model, so that workers do not need each other."""
    with contextlib.suppress(OSError):
        _model_path(Path(os.environ[_REPORT])).touch()


def report_gone(workers: Sequence[int]) -> None:
    """In a scheduler: reports the workers that have left or were lost, in order."""
    with contextlib.suppress(OSError):
        write_atomically(_gone_path(Path(os.environ[_REPORT])), json.dumps([*workers]).encode())


def _joined_path(report: Path) -> Path:
    return report.with_suffix(".joined")


def _address_path(report: Path) -> Path:
    return report.with_suffix(".address")


def _gone_path(report: Path) -> Path:
    return report.with_suffix(".gone")


def _model_path(report: Path) -> Path:
    return report.with_suffix(".model")


def die_with_parent() -> None:
    """In a rank: it is killed when the process that started it ends."""
    parent = int(os.environ[PARENT])
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    else:

        def watch() -> None:
            while os.getppid() == parent:
                time.sleep(1.0)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)
