"""Starts the ranks of a run on this machine, watches them, and starts them again if asked to.

The ranks find each other through a store that lives here, on a port of the loopback interface that
the system chose: there is no race for it, and nobody else can reach it. Ranks tell by a report (a
small JSON file) why they failed, so that the first cause is shown, once. They are killed when this
process ends, however it ends.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.experiment.record import write_atomically
from gradwire.experiment.signals import Interrupted, Signals

_REPORT, _PARENT = "GRADWIRE_REPORT", "GRADWIRE_PARENT"
_LEAVE_S = 15.0  # how long ranks may take to end once one of them has
_STOP_S = 60.0  # how long they may take to reach a point to stop at after a signal
_POLL_S = 0.02
_TAIL = 20  # lines shown of a rank that died without a report
WRONG, LOST = 2, 3  # exit codes: what was asked for cannot be done; a rank was lost


class Failure(NamedTuple):
    """Why ranks failed: what to show, the exit code, and whether to try again may help."""

    message: str
    code: int
    may_retry: bool


def launch(
    size: int,
    command: Callable[[int], Sequence[str]],
    restarts: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Runs `command(attempt)` as ranks 0 .. size - 1 until all have ended well."""
    with Signals().caught() as signals, signals.waiting():
        for attempt in range(restarts + 1):
            failure = _attempt(size, command(attempt), attempt, signals)
            if failure is None or not failure.may_retry or attempt == restarts:
                return failure
            say(f"{failure.message}\nstarting again ({attempt + 1} of {restarts})")
    raise AssertionError


def _attempt(size: int, command: Sequence[str], attempt: int, signals: Signals) -> Failure | None:
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="gradwire-") as place:
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            None,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0, too, is a client of the store
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback()),
            _PARENT: str(os.getpid()),
        }
        ranks = _Ranks(Path(place))
        try:
            for rank in range(size):
                ranks.start(rank, command, environment)
            failure = _watch(ranks, signals)
        finally:
            ranks.kill()
            del store
    return failure


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


class _Ranks:
    """The processes."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), _REPORT: str(self._report(rank))}
        # What rank 0 prints is the run's output; of others only what they say when they die.
        with self._output(rank).open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=environment | own,
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else output,
                    stderr=None if rank == 0 else output,
                    start_new_session=True,  # what a terminal sends comes from here, once
                )
            )

    def poll(self) -> list[int | None]:
        """Exit codes; None of those that run; negative: a signal."""
        return [process.poll() for process in self._processes]

    def signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def report(self, rank: int) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self._report(rank).read_text())
            return found
        return None

    def tail(self, rank: int) -> str:
        lines = self._output(rank).read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL:])

    def _report(self, rank: int) -> Path:
        return self._place / f"report-{rank}.json"

    def _output(self, rank: int) -> Path:
        return self._place / f"output-{rank}"


def _watch(ranks: _Ranks, signals: Signals) -> Failure | None:
    """Until all have ended. Those that stay when others have failed are killed after a while."""
    until, first, passed_on = float("inf"), None, 0
    with contextlib.suppress(Interrupted):  # a second signal: they, too, end at once
        while None in (codes := ranks.poll()):
            now = time.monotonic()
            if signals.wanted and not passed_on:
                passed_on, until = signals.wanted, now + _STOP_S
                ranks.signal(passed_on)
            if first is None:
                first = next((rank for rank, code in enumerate(codes) if code), None)
                until = min(until, now + _LEAVE_S) if first is not None else until
            if now > until:
                break
            time.sleep(_POLL_S)
    codes = ranks.poll()
    ranks.kill()
    if all(code == 0 for code in codes):
        return None
    if first is None:
        first = next((rank for rank, code in enumerate(codes) if code), None)
    return _failure(ranks, codes, first, passed_on)


def _failure(
    ranks: _Ranks, codes: Sequence[int | None], first: int | None, passed_on: int
) -> Failure:
    reports = {rank: ranks.report(rank) for rank in range(len(codes))}
    told = {rank: report for rank, report in reports.items() if report is not None}
    stopped = [report for report in told.values() if report["kind"] == "signal"]
    if passed_on or (stopped and not any(r["kind"] == "error" for r in told.values())):
        number = passed_on or stopped[0]["code"] - 128
        text = stopped[0]["message"] if stopped else str(Interrupted(number))
        return Failure(text, 128 + number, False)
    for kind in ("error", "lost"):  # who was lost to others is a consequence
        for report in told.values():
            if report["kind"] == kind:
                dead = _deaths(codes) if kind == "lost" else ""
                return Failure(
                    "\n".join(filter(None, [report["message"], dead])),
                    report["code"],
                    report["code"] != WRONG,
                )
    message = _deaths(codes) or "the ranks did not end"
    if first is not None and first > 0:
        message += f"\nthe last lines of rank {first}:\n{ranks.tail(first)}"
    return Failure(message, LOST, True)


def _deaths(codes: Sequence[int | None]) -> str:
    """Who died of what, without a word."""
    texts = []
    for rank, code in enumerate(codes):
        if code is None:
            texts.append(f"rank {rank} did not end and was killed")
        elif code < 0:
            texts.append(f"rank {rank} was killed by {signal.Signals(-code).name}")
        elif code not in (0, WRONG, LOST):
            texts.append(f"rank {rank} ended with exit code {code}")
    return "; ".join(texts)


# In a rank.


def is_launched() -> bool:
    """Whether this process was started by `launch`."""
    return _REPORT in os.environ


def report(kind: str, message: str, code: int) -> None:
    """In a rank: leaves word why it failed."""
    content = json.dumps({"kind": kind, "message": message, "code": code})
    with contextlib.suppress(OSError):  # who started this is gone
        write_atomically(Path(os.environ[_REPORT]), content.encode())


def die_with_parent() -> None:
    """In a rank: it is killed when the process that started it ends."""
    parent = int(os.environ[_PARENT])
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
