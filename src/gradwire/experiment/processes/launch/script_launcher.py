"""Starts a user's script as workers on this machine, with a scheduler and servers.

The scheduler binds free ports and reports them, then the others are started. A worker that fails
ends the job, since means need all workers: the others get some time to raise their own errors.
Where servers hold the model, the others continue. Servers end when all workers have left.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gradwire.experiment.processes.launch.children import LOST, Children
from gradwire.experiment.processes.launch.launcher import loopback
from gradwire.experiment.processes.launch.scratch import scratch_folder
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.experiment.processes.loops.job import LoopJob
from gradwire.runtime.zeromq.keys import make_keys

NODE = (sys.executable, "-m", "gradwire", "launch", "--role")
_COMMAND = (sys.executable, "-m", "gradwire.experiment.processes.launch.command")
_LEAVE_LIMIT_S = 20.0  # how long workers may take to end after another node has failed
_STOP_LIMIT_S = 60.0  # how long they may take to end after a signal from outside
_TERM_LIMIT_S = 5.0  # how long they may take to end after SIGTERM; and servers, after all workers
_FOREVER = "1000000s"  # nodes wait for workers that load data; the launcher sees whether they live
_POLL_S = 0.02


def launch_script(job: LoopJob, command: Sequence[str], say: Callable[[str], None]) -> int:
    """Runs the command as all workers of a job; returns the exit code. Of the job's addresses and
    keys nothing is used."""
    with (
        Signals().caught() as signals,
        signals.waiting(),
        scratch_folder() as place,
        contextlib.suppress(Interrupted),  # a second signal: all are killed
    ):
        return _LocalJob(job, command, say, signals, place).run()
    return 128 + signals.wanted


class _LocalJob:
    """The processes of a job on this machine."""

    def __init__(
        self,
        job: LoopJob,
        command: Sequence[str],
        say: Callable[[str], None],
        signals: Signals,
        place: Path,
    ) -> None:
        self.layout = job.layout
        self.command, self.say, self.signals = command, say, signals
        self.keys = place / "job.key"
        make_keys(self.keys)
        self.job = replace(job, scheduler="tcp://127.0.0.1:0", keys=self.keys, insecure=False)
        self.children = Children(place, self.layout.size, None, self.layout.name_of)
        self.failed: dict[int, int] = {}  # exit codes of nodes that failed, in order

    def run(self) -> int:
        try:
            if not self._start():
                return self._code(0)
            forwarded = self._watch()
            self._stop_workers()
            self._await_servers(was_good=not self.failed and not forwarded)
            return self._code(forwarded)
        finally:
            self.children.kill()

    def _start(self) -> bool:
        """Whether all were started."""
        layout, children = self.layout, self.children
        self._start_node(layout.scheduler)
        while (found := children.address(layout.scheduler)) is None:
            if self.signals.wanted or self._note_failures([layout.scheduler]):
                return False
            time.sleep(_POLL_S)
        address, store_port = found
        self.job = replace(self.job, scheduler=address)
        for rank in layout.servers:
            self._start_node(rank)
        for rank in layout.workers:
            own = {**os.environ, **self.job.environment(rank), "MASTER_PORT": str(store_port)}
            own |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(layout.num_workers)}
            own.setdefault("GLOO_SOCKET_IFNAME", loopback())
            if layout.num_workers > 1:  # as torchrun does
                own.setdefault("OMP_NUM_THREADS", "1")
            children.start(rank, [*_COMMAND, *self.command], own)
        return True

    def _start_node(self, rank: int) -> None:
        job, layout = self.job, self.layout
        command = [*NODE, layout.role_of(rank), "--scheduler", job.scheduler]
        command += ["--workers", str(job.num_workers), "--servers", str(job.num_servers)]
        command += ["--keys", str(self.keys), "--silence", job.silence, "--join-wait", _FOREVER]
        if layout.is_server(rank):
            command += ["--number", str(layout.number_of(rank))]
        self.children.start(rank, command, dict(os.environ))

    def _watch(self) -> int:
        """Waits until all workers have ended, or have had their time after a failure or a signal.
        Returns the signal that was forwarded to them, or 0."""
        until, forwarded, workers = float("inf"), 0, self.layout.workers
        while self._are_running(workers):
            now = time.monotonic()
            if self.signals.wanted and not forwarded:
                forwarded, until = self.signals.wanted, now + _STOP_LIMIT_S
                self.children.signal(forwarded, workers)
            for rank in self._note_failures(range(self.layout.size)):
                if until == float("inf") and not self._is_expendable(rank):
                    until = now + (_LEAVE_LIMIT_S if self._is_complete else 0.0)
            if now >= until:
                break
            time.sleep(_POLL_S)
        self._note_failures(workers)
        return forwarded

    def _is_expendable(self, rank: int) -> bool:
        """Whether the others can continue without this node."""
        servers = self.layout.servers
        return self.layout.is_worker(rank) and all(map(self.children.holds_model, servers))

    @property
    def _is_complete(self) -> bool:
        """Whether all have joined. Before that the others wait for the one that failed."""
        return self.children.has_joined(self.layout.scheduler)

    def _note_failures(self, ranks: Sequence[int]) -> list[int]:
        """Reports the nodes that have failed since the last time."""
        found = []
        for rank in ranks:
            code = self.children.code(rank)
            if code and rank not in self.failed and not self.signals.wanted:
                self.failed[rank] = code
                found.append(rank)
                name, report = self.layout.name_of(rank), self.children.report(rank)
                if report is not None:
                    self.say(f"{name}: {report['message']}")
                elif code < 0:
                    self.say(f"{name} was killed by {signal.Signals(-code).name}")
                else:
                    self.say(f"{name} ended with exit code {code}")
        return found

    def _are_running(self, ranks: Sequence[int]) -> bool:
        return any(self.children.code(rank) is None for rank in ranks)

    def _stop_workers(self) -> None:
        workers = self.layout.workers
        if self._are_running(workers):
            self.children.signal(signal.SIGTERM, workers)
            self._await(workers)

    def _await_servers(self, was_good: bool) -> None:
        """Servers and scheduler end when all workers have left, if these ever joined."""
        others = self.layout.others
        if self._is_complete:
            self._await(others)
        if was_good:
            self._note_failures(others)

    def _await(self, ranks: Sequence[int]) -> None:
        until = time.monotonic() + _TERM_LIMIT_S
        while self._are_running(ranks) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _code(self, forwarded: int) -> int:
        """Of the first worker that failed; else of the first other node.

        Others fail because of it, and their processes may end earlier. So the order is that in
        which they left the job, as the scheduler saw it.
        """
        if forwarded or self.signals.wanted:
            return 128 + (forwarded or self.signals.wanted)
        gone = self.children.gone(self.layout.scheduler)
        workers = [rank for rank in (*gone, *self.failed) if self.layout.is_worker(rank)]
        ranks = [rank for rank in (*workers, *self.failed) if rank in self.failed]
        if not ranks:
            return 0
        code = self.failed[ranks[0]]
        if code > 0:
            return code
        return 128 - code if self.layout.is_worker(ranks[0]) else LOST
