"""`gradwire run --engine process`: as one rank of torchrun's, or starting the ranks itself.

Exit codes: 0 done; 2 what was asked for cannot be done; 3 a rank was lost or nothing happened for
too long; 1 anything unexpected; 128 + n stopped by signal n, with a checkpoint.
"""

import os
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gradwire.cli.console import Meter, errors
from gradwire.core.errors import DataError, StoppedError
from gradwire.experiment import launcher
from gradwire.experiment.config import Config
from gradwire.experiment.outcome import Run
from gradwire.experiment.record import Record
from gradwire.experiment.setup import check_real
from gradwire.experiment.signals import Interrupted, Signals
from gradwire.runtime.network import parse_duration

Show = Callable[[Run, Path], None]


@dataclass(frozen=True)
class Job:
    """A run on real processes, as the command line describes it."""

    config: Config
    folder: Path
    resumes: bool
    checkpoint_every: str
    timeout: str
    restarts: int
    is_named: bool  # whether the folder was given
    json: bool

    def check(self) -> None:
        for name in ("checkpoint_every", "timeout"):
            parse_duration(getattr(self, name))
        if self.restarts < 0:
            raise ValueError(f"restarts must be at least 0, got {self.restarts}")


def world_size() -> int | None:
    """Of torchrun's process group, or our launcher's; None if this process is no rank."""
    size = os.environ.get("WORLD_SIZE")
    return int(size) if size and "RANK" in os.environ else None


def usual_config(path: Path | None) -> Config:
    """What holds without flags: under torchrun there are as many workers as ranks."""
    settings = Config() if path is None else Config.from_toml(path)
    size = world_size()
    if size is None or (path is not None and "workers" in tomllib.loads(path.read_text())):
        return settings
    return Config(**{**vars(settings), "workers": size})


def run_processes(job: Job, show: Show) -> None:
    """Runs it, and leaves with an exit code if it did not end well."""
    job.check()
    if world_size() is None:
        _launch(job)
    else:
        _be_rank(job, show)


def _launch(job: Job) -> None:
    from gradwire.experiment.processes import num_nodes  # imports torch.distributed

    size = num_nodes(job.config)
    check_real(job.config)
    if job.resumes:
        Record.open(job.folder)
    elif Record(job.folder).exists:
        Record.create(job.folder, job.config)  # says that there is a run already
    with tempfile.TemporaryDirectory(prefix="gradwire-") as place:
        path = Path(place) / "config.toml"
        path.write_text(job.config.to_toml())

        def command(attempt: int) -> list[str]:
            goes_on = job.resumes or (attempt > 0 and Record(job.folder).exists)
            which = (
                ["--resume", str(job.folder)]
                if goes_on
                else ["--config", str(path), "--out", str(job.folder)]
            )
            limits = ["--checkpoint-every", job.checkpoint_every, "--timeout", job.timeout]
            as_json = ["--json"] if job.json else []
            return [sys.executable, "-m", "gradwire", "run", *which, *limits, *as_json]

        failure = launcher.launch(size, command, job.restarts, _say)
    if failure is not None:
        _say(f"error: {failure.message}" if failure.code < 128 else failure.message)
        sys.exit(failure.code)


def _be_rank(job: Job, show: Show) -> NoReturn:
    """Trains, and ends this process: gloo may abort when it is torn down."""
    code = 1
    try:
        if launcher.is_launched():
            launcher.die_with_parent()
        with Signals().caught() as signals:
            code = _train(job, show, signals)
    except Interrupted as stop:  # before or after training
        code = _fail("signal", str(stop), 128 + stop.number)
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _train(job: Job, show: Show, signals: Signals) -> int:
    from gradwire.experiment import processes
    from gradwire.experiment.node_run import LostError, RefusedError
    from gradwire.experiment.meeting import meet

    rank = int(os.environ["RANK"])
    try:
        size, restarts = (
            processes.num_nodes(job.config),
            os.environ.get("TORCHELASTIC_MAX_RESTARTS"),
        )
        if world_size() != size:
            raise RefusedError(
                f"--workers {job.config.workers} on {job.config.architecture} makes {size} ranks, "
                f"but WORLD_SIZE is {world_size()}. Leave out --workers, or start {size} ranks."
            )
        if int(restarts or 0) and not job.is_named and not launcher.is_launched():
            raise RefusedError(
                "torchrun shall start the ranks again if one is lost: give --out FOLDER, so that "
                "they find their checkpoints"
            )
        # Its name may have the time in it, and clocks differ: that of rank 0 counts.
        folder = Path(meet(parse_duration(job.timeout), str(job.folder)))
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        with Meter() as meter:
            result = processes.run(
                None if job.resumes else job.config,
                out=None if job.resumes else folder,
                resume=folder if job.resumes else None,
                progress=meter.follow(folder.name) if rank == 0 else None,
                checkpoint_every=job.checkpoint_every,
                timeout=job.timeout,
                is_restart=is_restart,
                signals=signals,
            )
        if rank == 0:
            show(result, folder)
        return 0
    except Interrupted as stop:
        return _fail("signal", str(stop), 128 + stop.number, shows=rank == 0)
    except LostError as error:
        speaker = 1 if error.rank == 0 else 0
        return _fail("lost", str(error), launcher.LOST, shows=rank == speaker)
    except TimeoutError as error:
        return _fail("lost", f"the ranks did not meet: {error}", launcher.LOST)
    except (ValueError, DataError, StoppedError, OSError) as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        shows = rank == 0 or not isinstance(error, RefusedError)
        return _fail("error", f"{error}{notes}", launcher.WRONG, shows)
    except Exception:
        return _fail("error", traceback.format_exc(), 1)


def _fail(kind: str, message: str, code: int, shows: bool = True) -> int:
    if launcher.is_launched():
        launcher.report(kind, message, code)
    elif shows:
        _say(message if kind == "signal" else f"error: {message}")
    return code


def _say(text: str) -> None:
    errors.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
