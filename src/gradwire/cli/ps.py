"""`gradwire ps`: one node of a run with servers, on real processes, and the keys of such a job.

The environment variables of ps-lite and BytePS hold unless a flag is given: DMLC_ROLE,
DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT (the scheduler), DMLC_NUM_WORKER, DMLC_NUM_SERVER,
DMLC_WORKER_ID, DMLC_NODE_HOST (where a server is reached).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gradwire.cli.console import Folder, Meter, errors, new_folder, out
from gradwire.cli.ending import FINISHED, end_with, say
from gradwire.cli.run import show_run
from gradwire.experiment.processes.loops.job import default_bind, number, scheduler_address
from gradwire.experiment.run.config import OWN_SETTINGS, Config

if TYPE_CHECKING:
    from gradwire.experiment.processes.launch.signals import Signals
    from gradwire.experiment.processes.node.types import RunFolder
    from gradwire.experiment.processes.served import NodeOptions

_Address = Annotated[str, tyro.conf.arg(metavar="tcp://HOST:PORT", help_behavior_hint="")]


@dataclass(frozen=True)
class PsCommand:
    """Be the scheduler, a server or a worker of a run with servers; `ps keys FILE` makes keys.

    All nodes take the same settings, or the same `--config FILE`.
    """

    role: Annotated[
        Literal["scheduler", "server", "worker", "keys", ""],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="[scheduler|server|worker|keys]", help_behavior_hint="($DMLC_ROLE)"),
    ] = ""
    """The role of this node."""
    file: Annotated[
        Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE]", help_behavior_hint="")
    ] = None
    """With `keys`: where to write them. Give the file to all nodes, and to nobody else."""
    config: Config = field(default_factory=Config)
    scheduler: _Address = ""
    """Where the scheduler is; by default on this machine, port 9092 of its loopback interface."""
    number: Annotated[
        int | None, tyro.conf.arg(metavar="NUMBER", help_behavior_hint="($DMLC_WORKER_ID)")
    ] = None
    """Which of the workers or servers this is, from 0; by default any that is missing."""
    bind: _Address = ""
    """Server: where it listens; port 0 is any free one. By default on loopback if the scheduler
    is there, else on all interfaces."""
    advertise: _Address = ""
    """Server: where others reach it, if that is another address."""
    keys: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The job's keys (`gradwire ps keys FILE`). Needed for all that is not loopback."""
    insecure: bool = False
    """Run without keys, on a network where everybody is trusted."""
    out: Folder = None
    """Folder for the record, and for what servers need to continue after a crash."""
    resume: Folder = None
    """Resume the interrupted run in this folder."""
    restart: bool = False
    """Scheduler, with --resume: begin again if checkpoints cannot be used."""
    durable: bool = False
    """Server: acknowledge updates only when they are on disk."""
    silence: str = "5s"
    """Scheduler: how long a worker may be silent before it is lost."""
    server_wait: str = "60s"
    """How long to wait for a server to come back."""
    join_wait: str = "60s"
    """How long to wait at the start until all nodes have joined."""
    checkpoint_every: str = "30s"
    """How often to write checkpoints."""
    timeout: str = "300s"
    """How long nothing may happen before this node gives up."""
    json: bool = False
    """Scheduler: print the summary as JSON."""

    def __post_init__(self) -> None:
        # Here, and not when it is called, because flags are checked with this configuration.
        object.__setattr__(self, "config", replace(self.config, engine="process"))

    def __call__(self) -> None:
        if self.role == "keys":
            self._make_keys()
            return
        if self.file is not None:
            raise ValueError(f"{self.file}: a file goes with `gradwire ps keys FILE` only")
        from gradwire.experiment.processes.node.types import RunFolder
        from gradwire.experiment.processes.served import NodeOptions

        node = from_environment(self, os.environ)
        role = node.role
        assert role in ("scheduler", "server", "worker")
        folder = node.resume or node.out
        if folder is None and role == "scheduler":
            folder = new_folder("run")
        options = NodeOptions(
            role,
            node.scheduler,
            node.number,
            node.bind or default_bind(node.scheduler),
            node.advertise or None,
            node.keys,
            node.insecure,
            node.durable,
            node.silence,
            node.server_wait,
            node.join_wait,
        )
        where = RunFolder(folder, node.resume is not None, may_restart=node.restart)
        end_with(lambda signals: node._take_part(options, where, signals))

    def _take_part(self, options: NodeOptions, where: RunFolder, signals: Signals) -> None:
        from gradwire.experiment.processes.served import take_part
        from gradwire.experiment.run.record import Record

        is_coordinator = options.role == "scheduler"
        config = self.config
        if where.resumes and where.folder is not None:
            found, usual = Record.open(where.folder).config, Config()
            own = {name: getattr(config, name) for name in OWN_SETTINGS}
            given = {name: value for name, value in own.items() if value != getattr(usual, name)}
            config = replace(found, engine="process", **given)
        was_finished = is_coordinator and where.resumes and _is_finished(where.folder)
        name = "" if where.folder is None else where.folder.name
        with Meter() as meter:
            result = take_part(
                config,
                options,
                where,
                checkpoint_every=self.checkpoint_every,
                timeout=self.timeout,
                signals=signals,
                progress=meter.follow(name) if is_coordinator else None,
                say=say,
                report=_show_status,
            )
        if is_coordinator:
            assert where.folder is not None
            show_run(result, where.folder, self.json)
        if was_finished:
            say(FINISHED)

    def _make_keys(self) -> None:
        from gradwire.runtime.zeromq.keys import make_keys

        if self.file is None:
            raise ValueError("say where to write them: gradwire ps keys FILE")
        make_keys(self.file)
        out.print(
            f"{self.file} holds the keys of one job. Copy it to all its nodes, and let nobody else "
            f"read it; each takes it with --keys {self.file}",
            soft_wrap=True,
        )


def _is_finished(folder: Path | None) -> bool:
    from gradwire.experiment.run.record import Record

    return folder is not None and Record(folder).is_finished


def _show_status(text: str) -> None:
    """Shows the progress of a node that was started by hand."""
    from gradwire.experiment.processes.launch.children import is_launched

    if not is_launched():
        errors.print(text, markup=False, highlight=False, soft_wrap=True)


def from_environment(command: PsCommand, environment: Mapping[str, str]) -> PsCommand:
    """The command, completed by the environment variables of ps-lite."""
    from gradwire.architecture import ARCHITECTURE

    role: Any = command.role or environment.get("DMLC_ROLE", "")
    if role not in ("scheduler", "server", "worker"):
        raise ValueError(
            "say what this node is: gradwire ps scheduler, server or worker (or DMLC_ROLE)"
            + (f", not {role!r}" if role else "")
        )
    scheduler = command.scheduler or scheduler_address(environment)
    config = command.config
    workers, servers = (
        number(environment, "DMLC_NUM_WORKER"),
        number(environment, "DMLC_NUM_SERVER"),
    )
    if workers is not None and config.workers == Config().workers:
        config = replace(config, workers=workers)
    if not ARCHITECTURE.parse(config.architecture).num_others:
        if config.architecture != Config().architecture:
            raise ValueError(f"{config.architecture} has no servers: try parameter_server(1)")
        config = replace(config, architecture=f"parameter_server({servers or 1})")
    found = ARCHITECTURE.parse(config.architecture).num_servers
    if servers not in (None, found):
        raise ValueError(f"DMLC_NUM_SERVER is {servers}, but {config.architecture} has {found}")
    own = command.number
    if own is None and role == "worker":
        own = number(environment, "DMLC_WORKER_ID")
    bind = command.bind
    if not bind and role == "server" and environment.get("DMLC_NODE_HOST"):
        bind = f"tcp://{environment['DMLC_NODE_HOST']}:0"
    return replace(command, role=role, scheduler=scheduler, config=config, number=own, bind=bind)
