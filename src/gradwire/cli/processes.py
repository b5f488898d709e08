"""`gradwire run --engine process`: runs one rank of torchrun's, or starts the ranks itself.

If the architecture has servers, it starts the nodes of `gradwire ps`.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gradwire.cli.console import Meter
from gradwire.cli.defaults import world_size
from gradwire.cli.ending import FINISHED, end_with, say
from gradwire.core.errors import DifferentSettingsError, LostError, RefusedError
from gradwire.core.layout import RoleName
from gradwire.experiment.processes.launch.children import is_launched
from gradwire.experiment.processes.launch.launcher import launch
from gradwire.experiment.processes.launch.role_launcher import Roles, launch_roles
from gradwire.experiment.processes.launch.scratch import scratch_folder
from gradwire.experiment.processes.launch.signals import Interrupted, Signals
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.machine import layout_of
from gradwire.experiment.run.outcome import Run
from gradwire.experiment.run.record import Record
from gradwire.experiment.run.setup import check_real
from gradwire.runtime.network.network import parse_duration
from gradwire.runtime.storage.files import write_atomically
from gradwire.synchronization import SYNCHRONIZATION

GRADWIRE = (sys.executable, "-m", "gradwire")
Show = Callable[[Run, Path], None]


@dataclass(frozen=True)
class ProcessRun:
    """A run on real processes, as the command line describes it."""

    config: Config
    folder: Path
    resumes: bool
    checkpoint_every: str
    timeout: str
    restarts: int
    is_named: bool  # whether the folder was given
    json: bool
    durable: bool = False
    silence: str = "5s"
    join_wait: str = "60s"
    restart: bool = False

    def check(self) -> None:
        for name in ("checkpoint_every", "timeout", "silence", "join_wait"):
            parse_duration(getattr(self, name))
        if self.restarts < 0:
            raise ValueError(f"restarts must be at least 0, got {self.restarts}")
        if self.durable and not layout_of(self.config).others:
            raise ValueError(f"--durable is for servers, and {self.config.architecture} has none")


def run_processes(job: ProcessRun, show: Show) -> None:
    """Runs it, and exits with a code if it did not end well."""
    job.check()
    if world_size() is None:
        _launch(job)
    else:
        _run_rank(job, show)


def _launch(job: ProcessRun) -> None:
    layout = layout_of(job.config)
    check_real(job.config)
    if not job.resumes:
        Record(job.folder).check_empty()
    with scratch_folder() as place:
        path = place / "config.toml"
        write_atomically(path, job.config.to_toml().encode())
        limits = ["--checkpoint-every", job.checkpoint_every, "--timeout", job.timeout]
        as_json = ["--json"] if job.json else []
        restart = ["--restart"] if job.restart else []

        def which(is_again: bool) -> list[str]:
            if job.resumes or (is_again and Record(job.folder).exists):
                return ["--resume", str(job.folder)]
            return ["--config", str(path), "--out", str(job.folder)]

        def rank(attempt: int) -> list[str]:
            return [*GRADWIRE, "run", *which(attempt > 0), *limits, *as_json, *restart]

        def node(
            role: RoleName, number: int, scheduler: str, keys: str, is_restart: bool
        ) -> list[str]:
            own: dict[str, list[str]] = {
                "scheduler": ["--silence", job.silence, *as_json, *restart],
                "server": ["--durable"] if job.durable else [],
                "worker": [],
            }
            where = ["--scheduler", scheduler, "--keys", keys, "--join-wait", job.join_wait]
            if role != "scheduler":
                where += ["--number", str(number)]
            return [*GRADWIRE, "ps", role, *where, *which(is_restart), *limits, *own[role]]

        if layout.others:
            replaces_workers = not SYNCHRONIZATION.parse(job.config.synchronization).pauses
            roles = Roles(layout, replaces_workers, replaces_servers=True)
            failure = launch_roles(roles, node, job.restarts, say)
        else:
            failure = launch(layout.size, rank, job.restarts, say)
    if failure is not None:
        say(f"error: {failure.message}" if failure.code < 128 else failure.message)
        sys.exit(failure.code)


def _run_rank(job: ProcessRun, show: Show) -> NoReturn:
    rank = int(os.environ["RANK"])

    def shows(error: BaseException) -> bool:
        if isinstance(error, LostError):
            return rank == (1 if error.rank == 0 else 0)
        if isinstance(error, DifferentSettingsError):  # each rank names its own
            return True
        return rank == 0 or not isinstance(error, Interrupted | RefusedError)

    end_with(lambda signals: _train(job, show, rank, signals), shows)


def _train(job: ProcessRun, show: Show, rank: int, signals: Signals) -> None:
    from gradwire.experiment.processes import ranks as processes
    from gradwire.experiment.processes.meeting import meet
    from gradwire.experiment.run.machine import backend_of

    layout = layout_of(job.config)
    size = layout.size
    if world_size() != size:
        # Other ranks may have another WORLD_SIZE, and wait for this one.
        raise DifferentSettingsError(
            f"--workers {job.config.workers} on {job.config.architecture} makes {size} ranks, "
            f"but WORLD_SIZE of rank {rank} is {world_size()}. Leave out --workers, or start "
            f"{size} ranks."
        )
    has_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0
    if has_restarts and not job.is_named and not is_launched():
        raise RefusedError(
            "torchrun restarts the ranks if one is lost: give --out FOLDER, so that they find "
            "their checkpoints"
        )
    # Its name may contain the time, and clocks differ: all take that of rank 0.
    backend = backend_of(job.config)
    folder = Path(meet(parse_duration(job.timeout), str(job.folder), backend))
    is_coordinator = rank == layout.coordinator
    was_finished = is_coordinator and job.resumes and Record.open(folder).is_finished
    with Meter() as meter:
        result = processes.run(
            None if job.resumes else job.config,
            out=None if job.resumes else folder,
            resume=folder if job.resumes else None,
            progress=meter.follow(folder.name) if is_coordinator else None,
            checkpoint_every=job.checkpoint_every,
            timeout=job.timeout,
            is_restart=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0,
            restart=job.restart,
            say=say,
            signals=signals,
        )
    if is_coordinator:
        show(result, folder)
    if was_finished:
        say(FINISHED)
