"""Starts scheduler, servers and workers of a run on this machine, and watches them.

A server that is killed is restarted and continues from its files. A worker is restarted if the
others can continue without it meanwhile. If they cannot, the job stops, and all nodes are restarted
from the last checkpoint.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from gradwire.core.layout import NodeLayout, RoleName
from gradwire.experiment.processes.launch.children import (
    LOST,
    Children,
    Failure,
    describe_deaths,
    failure_of,
    ignore_running,
)
from gradwire.experiment.processes.launch.scratch import scratch_folder
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.runtime.zeromq.keys import descriptor_path, throwaway_keys

_LEAVE_LIMIT_S = 20.0  # how long nodes may take to end after the scheduler has ended
_LOST_LIMIT_S = 2.0  # the same, if the scheduler was killed
_STOP_LIMIT_S = 60.0  # how long nodes may take to end after a signal
_POLL_S = 0.02


class Command(Protocol):
    def __call__(
        self, role: RoleName, number: int, scheduler: str, keys: str, is_restart: bool
    ) -> Sequence[str]:
        """The command of a node. `keys`: the job's key file. `is_restart`: the job is restarted."""
        ...


class Roles(NamedTuple):
    """The nodes of a job, and which of them may be replaced while it runs."""

    layout: NodeLayout
    replaces_workers: bool
    replaces_servers: bool

    def may_be_replaced(self, rank: int) -> bool:
        if self.layout.is_worker(rank):
            return self.replaces_workers
        return self.replaces_servers and self.layout.is_server(rank)


def launch_roles(
    roles: Roles,
    command: Command,
    restarts: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Failure | None:
    """Runs a job until it has ended well, with at most so many restarts of processes or jobs."""
    with Signals().caught() as signals, signals.waiting():
        is_restart = False
        while True:
            job = _LocalJob(roles, command, restarts, say, signals)
            failure = job.run(is_restart)
            restarts, is_restart = job.restarts - 1, True
            if failure is None or not failure.may_retry or restarts < 0:
                return failure
            say(f"{failure.message}\nstarting again")


class _LocalJob:
    """The processes of one start of all nodes."""

    def __init__(
        self,
        roles: Roles,
        command: Command,
        restarts: int,
        say: Callable[[str], None],
        signals: Signals,
    ) -> None:
        self.roles, self.layout = roles, roles.layout
        self.command, self.restarts = command, restarts
        self.say, self.signals = say, signals
        self.environment = {**os.environ, "LOCAL_WORLD_SIZE": str(roles.layout.size)}
        self.scheduler = f"tcp://127.0.0.1:{_free_port()}"

    def run(self, is_restart: bool) -> Failure | None:
        """The job has its own keys, so that other users of this machine cannot join."""
        layout = self.layout
        with scratch_folder() as place, throwaway_keys() as self.keys:
            self.children = Children(place, layout.size, layout.scheduler, layout.name_of)
            try:
                for rank in reversed(range(layout.size)):
                    self._start(rank, is_restart)
                return self._watch()
            finally:
                self.children.kill()

    def _start(self, rank: int, is_restart: bool) -> None:
        keys, layout = descriptor_path(self.keys), self.layout
        role, number = layout.role_of(rank), layout.number_of(rank)
        command = self.command(role, number, self.scheduler, keys, is_restart)
        own = {"LOCAL_RANK": str(rank)}
        self.children.start(rank, command, self.environment | own, [self.keys])

    def _watch(self) -> Failure | None:
        """Waits until the scheduler has ended, and the others after it. If a process ends for good
        before all have joined, it stops at once, since the others would wait for that process."""
        until, forwarded, first, was_complete = float("inf"), 0, None, True
        given_up: set[int] = set()
        with contextlib.suppress(Interrupted):  # a second signal: the nodes end at once, too
            while None in (codes := self.children.poll()):
                now = time.monotonic()
                if self.signals.wanted and not forwarded:
                    forwarded, until = self.signals.wanted, now + _STOP_LIMIT_S
                    self.children.signal(forwarded)
                if (ended := codes[self.layout.scheduler]) is not None:
                    until = min(until, now + (_LEAVE_LIMIT_S if ended >= 0 else _LOST_LIMIT_S))
                    was_complete = self._is_complete
                for rank, code in enumerate(codes):
                    if not code or rank in given_up or until < float("inf"):
                        continue
                    if not self._replace(rank, code):
                        given_up.add(rank)
                        first = rank if first is None else first
                        was_complete = self._is_complete
                        if not was_complete:
                            break
                        if not self.layout.is_worker(rank):  # the others need it
                            until = now + _LEAVE_LIMIT_S
                        elif self.roles.replaces_workers:
                            self._show_end(rank, code)
                if now > until or not was_complete:
                    break
                time.sleep(_POLL_S)
        codes = self.children.poll()
        self.children.kill()
        ended = codes[self.layout.scheduler]
        if ended == 0:
            return None
        if not was_complete or (ended is not None and ended < 0):
            codes = ignore_running(codes)  # they wait for the one that ended
        return failure_of(self.children, codes, first, forwarded)

    @property
    def _is_complete(self) -> bool:
        """Whether all nodes have joined, as the scheduler reports it."""
        return self.children.has_joined(self.layout.scheduler)

    def _show_end(self, rank: int, code: int) -> None:
        """Shows why a worker ended, if the others continue without it."""
        report, name = self.children.report(rank), self.layout.name_of(rank)
        if report is not None:
            self.say(f"{name}: {report['message']}")
        else:
            self.say(
                describe_deaths({rank: code}, self.layout.name_of)
                or f"{name} ended with exit code {code}"
            )

    def _replace(self, rank: int, code: int) -> bool:
        """Restarts a node that was killed, or a worker that was declared lost, if possible; returns
        whether it did."""
        was_killed, was_lost = code < 0, code == LOST and self.layout.is_worker(rank)
        if not self.restarts or not self.roles.may_be_replaced(rank):
            return False
        if not (was_killed or was_lost):
            return False
        self.restarts -= 1
        name = self.layout.name_of(rank)
        if was_killed:
            self.say(f"{name} was killed by {signal.Signals(-code).name}; starting it again")
        else:
            self._show_end(rank, code)
            self.say(f"{name}: starting it again")
        self._start(rank, False)
        return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
