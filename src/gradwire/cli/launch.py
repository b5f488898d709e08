"""`gradwire launch`: a user's script as workers, with a scheduler and servers.

Without `--role` (or $DMLC_ROLE) all of them are started on this machine. With it this is one node
of a job on several machines; the environment variables of ps-lite and BytePS hold unless an option
is given.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gradwire.cli.console import errors
from gradwire.cli.ending import end_with, say
from gradwire.experiment.processes.loops.job import (
    LoopJob,
    LoopNode,
    complete,
    number,
    scheduler_address,
)

if TYPE_CHECKING:
    from gradwire.experiment.processes.launch.signals import Signals

_Count = Annotated[int | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="")]
_Address = Annotated[str, tyro.conf.arg(metavar="tcp://HOST:PORT", help_behavior_hint="")]
_EXAMPLE = "gradwire launch --workers 2 --servers 1 -- python train.py"


def split_script(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The arguments of `gradwire launch`, and the command after `--`."""
    argv = list(argv)
    if argv[:1] != ["launch"] or "--" not in argv:
        return argv, ()
    place = argv.index("--")
    return argv[:place], tuple(argv[place + 1 :])


@dataclass(frozen=True)
class LaunchCommand:
    """Run a script with parameter servers.

    gradwire launch --workers 4 --servers 2 -- python train.py

    In the script gradwire.DistributedOptimizer(..., architecture="parameter_server(2)") uses the
    servers.
    """

    script: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    workers: _Count = None
    """Workers, which run the script ($DMLC_NUM_WORKER, or 2)."""
    servers: _Count = None
    """Servers ($DMLC_NUM_SERVER, or 1)."""
    role: Annotated[
        Literal["scheduler", "server", "worker", ""],
        tyro.conf.arg(metavar="scheduler|server|worker", help_behavior_hint="($DMLC_ROLE)"),
    ] = ""
    """On several machines: be this one node. By default all are started here."""
    scheduler: _Address = ""
    """With a role: where the scheduler is ($DMLC_PS_ROOT_URI, $DMLC_PS_ROOT_PORT)."""
    number: Annotated[
        int | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="($DMLC_WORKER_ID)")
    ] = None
    """With a role: which of the workers or servers this is, from 0."""
    bind: _Address = ""
    """Server: where it listens; port 0 is any free one."""
    advertise: _Address = ""
    """Server: where others reach it, if that is another address."""
    keys: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With a role: the job's keys (`gradwire ps keys FILE`), needed where this is not loopback."""
    insecure: bool = False
    """With a role: run without keys, on a network where everybody is trusted."""
    silence: str = "10s"
    """How long a node may be silent before it is lost. Scheduler and servers need the same."""
    join_wait: str = "600s"
    """Scheduler and servers: how long to wait until all have joined."""

    def __call__(self) -> None:
        role, job = self._role(os.environ), self._job(os.environ)
        if role in ("scheduler", "server"):
            if self.script:
                raise ValueError(f"a {role} runs no script: leave out what comes after --")
            self._serve(job, role)
        if not self.script:
            raise ValueError(f"write the command of the workers after --, as in: {_EXAMPLE}")
        if role == "worker":
            self._work(job)
        for name in ("scheduler", "number", "bind", "advertise", "keys", "insecure"):
            if getattr(self, name) not in ("", None, False):
                raise ValueError(f"--{name} goes with --role: without it all is started here")
        from gradwire.experiment.processes.launch.script_launcher import launch_script

        sys.exit(launch_script(job, self.script, say))

    def _role(self, environment: Any) -> Any:
        role = self.role or environment.get("DMLC_ROLE", "")
        if role not in ("scheduler", "server", "worker", ""):
            raise ValueError(f"DMLC_ROLE is scheduler, server or worker, got {role!r}")
        return role

    def _job(self, environment: Any) -> LoopJob:
        workers, servers = self.workers, self.servers
        if workers is None:
            workers = number(environment, "DMLC_NUM_WORKER")
        if servers is None:
            servers = number(environment, "DMLC_NUM_SERVER")
        return LoopJob(
            2 if workers is None else workers,
            1 if servers is None else servers,
            self.scheduler or scheduler_address(environment),
            self.keys,
            self.insecure,
            self.silence,
        )

    def _serve(self, job: LoopJob, role: Any) -> None:
        bind = self.bind
        if not bind and role == "server" and os.environ.get("DMLC_NODE_HOST"):
            bind = f"tcp://{os.environ['DMLC_NODE_HOST']}:0"
        own = LoopNode(job, role, self.number, bind, self.advertise, self.join_wait)

        def work(signals: Signals) -> None:
            from gradwire.experiment.processes.loops.node import serve

            serve(own, signals, _show_status)

        end_with(work)

    def _work(self, job: LoopJob) -> None:
        """This process becomes the script."""
        own = number(os.environ, "DMLC_WORKER_ID") if self.number is None else self.number
        if own is None:
            raise ValueError("say which of the workers this is: --number 0, or DMLC_WORKER_ID")
        if not 0 <= own < job.num_workers:
            raise ValueError(f"there is no worker {own}: there are {job.num_workers}, from 0")
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
        complete(os.environ, job, own)
        os.execvp(self.script[0], self.script)


def _show_status(text: str) -> None:
    """Shows the progress of a node that was started by hand."""
    from gradwire.experiment.processes.launch.children import is_launched

    if not is_launched():
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
