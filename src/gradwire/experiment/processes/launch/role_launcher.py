"""Starts scheduler, servers and workers of a run on this machine, and watches them.

A server that is killed is started again and goes on from its files. So is a worker where the
others go on without it meanwhile. Where they cannot, the job stops, and all are started again from
the last checkpoint.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gradwire.experiment.processes.launch.children import (
    LOST,
    Children,
    Failure,
    deaths,
    failure_of,
    without_the_living,
)
from gradwire.experiment.processes.launch.scratch import scratch_folder
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.experiment.run.machine import name_of
from gradwire.runtime.zeromq.keys import descriptor_path, throwaway_keys

_LEAVE_S = 20.0  # how long nodes may take to end once the scheduler has
_LOST_S = 2.0  # and if it was killed
_STOP_S = 60.0
_POLL_S = 0.02


class Command(Protocol):
    def __call__(
        self, role: str, number: int, scheduler: str, keys: str, is_restart: bool
    ) -> Sequence[str]:
        """What to start. `keys`: the job's key file. `is_restart`: the job is started again."""
        ...


class RoleCounts(NamedTuple):
    """How many nodes there are of each role, and which of them may be replaced."""

    num_workers: int
    num_servers: int
    replaces_workers: bool  # whether one that was lost may come back
    replaces_servers: bool

    @property
    def size(self) -> int:
        return self.num_workers + self.num_servers + 1

    @property
    def scheduler(self) -> int:
        return self.size - 1

    def role(self, rank: int) -> tuple[str, int]:
        if rank < self.num_workers:
            return "worker", rank
        if rank < self.scheduler:
            return "server", rank - self.num_workers
        return "scheduler", 0

    def name(self, rank: int) -> str:
        return name_of(rank, self.num_workers, self.size)

    def may_come_back(self, rank: int) -> bool:
        if rank == self.scheduler:
            return False
        return self.replaces_workers if rank < self.num_workers else self.replaces_servers


def launch_roles(
    roles: RoleCounts,
    command: Command,
    restarts: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Runs a job until it has ended well, with at most so many processes or jobs started again."""
    with Signals().caught() as signals, signals.waiting():
        is_restart = False
        while True:
            job = _Job(roles, command, restarts, say, signals)
            failure = job.run(is_restart)
            restarts, is_restart = job.restarts - 1, True
            if failure is None or not failure.may_retry or restarts < 0:
                return failure
            say(f"{failure.message}\nstarting again")


class _Job:
    def __init__(
        self,
        roles: RoleCounts,
        command: Command,
        restarts: int,
        say: Callable[[str], None],
        signals: Signals,
    ) -> None:
        self.roles, self.command, self.restarts = roles, command, restarts
        self.say, self.signals = say, signals
        self.environment = {**os.environ, "LOCAL_WORLD_SIZE": str(roles.size)}
        self.scheduler = f"tcp://127.0.0.1:{_free_port()}"

    def run(self, is_restart: bool) -> Failure | None:
        """With keys of its own: another user of this machine cannot join."""
        with scratch_folder() as place, throwaway_keys() as self.keys:
            self.children = Children(place, self.roles.size, self.roles.scheduler, self.roles.name)
            try:
                for rank in reversed(range(self.roles.size)):
                    self._start(rank, is_restart)
                return self._watch()
            finally:
                self.children.kill()

    def _start(self, rank: int, is_restart: bool) -> None:
        keys = descriptor_path(self.keys)
        command = self.command(*self.roles.role(rank), self.scheduler, keys, is_restart)
        own = {"LOCAL_RANK": str(rank)}
        self.children.start(rank, command, self.environment | own, [self.keys])

    def _watch(self) -> Failure | None:
        """Until the scheduler has ended, and the others after it; or until one dies for good before
        all have joined, since the others would wait for it."""
        until, passed_on, first, was_complete = float("inf"), 0, None, True
        given_up: set[int] = set()
        with contextlib.suppress(Interrupted):  # a second signal: they, too, end at once
            while None in (codes := self.children.poll()):
                now = time.monotonic()
                if self.signals.wanted and not passed_on:
                    passed_on, until = self.signals.wanted, now + _STOP_S
                    self.children.signal(passed_on)
                if (ended := codes[self.roles.scheduler]) is not None:
                    until = min(until, now + (_LEAVE_S if ended >= 0 else _LOST_S))
                    was_complete = self._is_complete
                for rank, code in enumerate(codes):
                    if not code or rank in given_up or until < float("inf"):
                        continue
                    if not self._came_back(rank, code):
                        given_up.add(rank)
                        first = rank if first is None else first
                        was_complete = self._is_complete
                        if not was_complete:
                            break
                        if rank >= self.roles.num_workers:  # nobody can go on without it
                            until = now + _LEAVE_S
                        elif self.roles.replaces_workers:
                            self._tell(rank, code)
                if now > until or not was_complete:
                    break
                time.sleep(_POLL_S)
        codes = self.children.poll()
        self.children.kill()
        ended = codes[self.roles.scheduler]
        if ended == 0:
            return None
        if not was_complete or (ended is not None and ended < 0):
            codes = without_the_living(codes)  # that they did not end is a consequence
        return failure_of(self.children, codes, first, passed_on)

    @property
    def _is_complete(self) -> bool:
        """Whether all have joined: the scheduler says so."""
        return self.children.has_joined(self.roles.scheduler)

    def _tell(self, rank: int, code: int) -> None:
        """Why a worker ended without which the others go on."""
        report, name = self.children.report(rank), self.roles.name(rank)
        if report is not None:
            self.say(f"{name}: {report['message']}")
        else:
            self.say(deaths({rank: code}, self.roles.name) or f"{name} ended with exit code {code}")

    def _came_back(self, rank: int, code: int) -> bool:
        """Whether one that was killed is started again; or a worker that was out of the job for
        too long, and is no member any more."""
        was_killed, was_out = code < 0, code == LOST and rank < self.roles.num_workers
        may = self.restarts and self.roles.may_come_back(rank)
        if not may or not (was_killed or was_out):
            return False
        self.restarts -= 1
        name = self.roles.name(rank)
        if was_killed:
            self.say(f"{name} was killed by {signal.Signals(-code).name}; starting it again")
        else:
            self._tell(rank, code)
            self.say(f"{name}: starting it again")
        self._start(rank, False)
        return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
