"""The jobs that a soak disturbs: runs on real processes, started as a user would."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.experiment.processes.state.checkpoints import Checkpoints
from listing import live_glob
from soak import watch

_COMMON = {
    "engine": "process",
    "model": "mlp((16,))",
    "batch_size": 8,
    "threads": 1,
    "evaluation": "sequential",
}
_SERVED = {**_COMMON, "workers": 2, "architecture": "parameter_server(2)"}
_SYNCHRONOUS = {
    "compression": "ef(topk(0.1))",
    "optimizer": "sgd(0.05, momentum=0.9)",
    "momentum_at": "after",  # the optimizer, too, has a state
    "eval_every": 20,
}
_KEYLESS = Path(__file__).with_name("keyless.py")
_LIMITS = {"silence": "5s", "join_wait": "60s", "timeout": "60s"}


@dataclass(frozen=True)
class Job:
    """What to run. A synchronous one must end in the same bits, however often it was resumed."""

    name: str
    settings: dict[str, Any]
    roles: tuple[str, ...]  # whose processes can be disturbed
    is_synchronous: bool
    is_served: bool
    is_durable: bool = False  # then no acknowledged update is ever lost
    counts_updates: bool = False  # servers know how many they have
    has_keys: bool = True  # without, it is only sent what its members must ignore

    @property
    def num_servers(self) -> int:
        return 2 if self.is_served else 0

    @property
    def program(self) -> list[str]:
        return [sys.executable, *(["-m", "gradwire"] if self.has_keys else [str(_KEYLESS)])]

    def arguments(self, folder: Path, resumes: bool) -> list[str]:
        limits = _LIMITS if self.is_served else {"timeout": "60s"}
        chosen = dict(limits) if resumes else {**self.settings, **limits}
        more = ["--durable"] if self.is_durable else []
        where = ["--resume" if resumes else "--out", str(folder)]
        return ["run", *_flags(chosen), *more, "--checkpoint-every", "1s", *where]


def _flags(settings: dict[str, Any]) -> list[str]:
    return [
        text
        for name, value in settings.items()
        for text in (f"--{name.replace('_', '-')}", f"{value}")
    ]


_NODES = ("worker", "server", "scheduler", "launcher")
JOBS = (
    Job("bsp", {**_SERVED, **_SYNCHRONOUS, "steps": 500}, _NODES, True, True),
    Job(
        "asp",
        {**_SERVED, "synchronization": "asp", "steps": 1500, "eval_every": 500},
        _NODES,
        False,
        True,
        is_durable=True,
        counts_updates=True,
    ),
    Job(
        "ssp",
        {**_SERVED, "synchronization": "ssp(2)", "steps": 1500, "eval_every": 500},
        _NODES,
        False,
        True,
        is_durable=True,
    ),
    Job(
        "ring",
        {**_COMMON, **_SYNCHRONOUS, "workers": 3, "architecture": "ring", "steps": 1200},
        ("rank", "launcher"),
        True,
        False,
    ),
    # Gradients leave layer by layer; with `dear` pieces of the model arrive during the next step.
    Job(
        "layers",
        {**_SERVED, **_SYNCHRONOUS, "steps": 400, "scheduling": "wfbp"},
        _NODES,
        True,
        True,
    ),
    Job(
        "halves",
        {**_COMMON, **_SYNCHRONOUS, "workers": 3, "steps": 1000, "scheduling": "dear(1000)"},
        ("rank", "launcher"),
        True,
        False,
    ),
    Job("open", {**_SERVED, **_SYNCHRONOUS, "steps": 1500}, _NODES, True, True, has_keys=False),
)

_TRAINED_NBYTES = 6000  # more than what is agreed upon before the training
_numbers = itertools.count()


class Launch:
    """`gradwire run` under way, with all processes that it starts."""

    def __init__(self, job: Job, folder: Path, temporary: Path, more: list[str]) -> None:
        self.job, self.folder, self.temporary = job, folder, temporary
        self.resumes = (folder / "config.toml").exists()
        # A launch with `--restart` may begin again.
        self.had_complete = "--restart" not in more and Checkpoints(folder, 0).had_complete
        self.mark = f"{os.getpid()}-{next(_numbers)}"
        self.began_s = time.time()
        temporary.mkdir(parents=True, exist_ok=True)
        # Not on the disk that may be full: what a run prints then is what matters.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*job.program, *job.arguments(folder, self.resumes), *more],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GRADWIRE_CACHE": "",
                "TMPDIR": str(temporary),
                watch.MARK: self.mark,
            },
        )
        self.pid = self._process.pid
        self.trained = False  # as far as `observe` has seen

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def said(self) -> str:
        nbytes = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), nbytes, 0).decode(errors="replace")

    def processes(self, role: str) -> dict[int, str]:
        """Those of a role, such as `worker`, that run now."""
        return {pid: name for pid, name in watch.find(self.mark).items() if name.split()[0] == role}

    def observe(self) -> int | None:
        """The exit code, once it has ended; notes whether it trains."""
        code = self.code
        self.trained = self.trained or self.is_training()
        return code

    def is_training(self) -> bool:
        """Whether it has left something since it started that only a run that trains leaves."""
        found = live_glob(self.folder, "servers/*/journal-*.log")
        if self.job.is_synchronous:  # else they may be what servers had before
            found += live_glob(self.folder, "checkpoints/step-*/rank-*.pt")
        for path in found:
            with suppress(OSError):
                status = path.stat()
                if status.st_size > _TRAINED_NBYTES and status.st_mtime > self.began_s:
                    return True
        return False

    def kill(self) -> None:
        """All that is left of it."""
        for pid in watch.find(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self._process.kill()
        self._process.wait()


def is_finished(folder: Path) -> bool:
    path = folder / "summary.json"
    return path.exists() and "stopped" not in json.loads(path.read_text())
