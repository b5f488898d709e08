"""`gradwire run` and torchrun as processes of their own, to be killed and watched by tests."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, equal, load

import gradwire

SETTINGS: dict[str, Any] = {
    "model": "mlp((16,))",
    "batch_size": 8,
    "steps": 600,
    "eval_every": 50,
    "threads": 1,
    "evaluation": "sequential",  # starts at once
    "compression": "ef(topk(0.05))",
    "optimizer": "sgd(0.05, momentum=0.9)",
    "momentum_at": "after",  # the optimizer, too, has a state
}
FLAGS = [
    text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Command:
    """A command under way. Leaves nothing behind."""

    def __init__(self, *command: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self.ranks: dict[int, int] = {}  # pids

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (self.process.pid, *self.ranks.values(), *ranks_of(self.process.pid).values()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def wait_for_another(self, folder: Path) -> None:
        """Until there is a later checkpoint than those there are, and all have it: one more."""
        self.wait_for_step(folder, newest_checkpoint(folder) + 2 * SETTINGS["eval_every"])

    def wait_for_step(self, folder: Path, step: int, seconds: float = 150.0) -> None:
        """Until there is a checkpoint of this step or a later one; then its ranks are known."""
        until = time.monotonic() + seconds
        while (newest := newest_checkpoint(folder)) < step:
            assert time.monotonic() < until, f"the newest checkpoint is of step {newest}"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.003)
        self.ranks = ranks_of(self.process.pid)

    def end(self, seconds: float = 150.0) -> tuple[int, str]:
        """Its exit code, and what it said."""
        out, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, out + errors


def gradwire_run(*arguments: str) -> Command:
    return Command(sys.executable, "-m", "gradwire", "run", *arguments)


def ranks_of(pid: int) -> dict[int, int]:
    """Process ids of the children that are ranks."""
    found = {}
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in children:
            with suppress(OSError):
                environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                for entry in environment:
                    if entry.startswith(b"RANK="):
                        found[int(entry[5:])] = int(child)
    return found


def is_running(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return False


def are_gone(pids: list[int], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(is_running, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def simulated(workers: int, **settings: Any) -> Tensor:
    chosen = {**SETTINGS, "workers": workers, "compute": "fixed(0.001)", **settings}
    return gradwire.simulate(**chosen).params


def is_saved(folder: Path, params: Tensor) -> bool:
    """Whether the run in this folder ended in these bits."""
    return equal(load(folder / "model.pt", weights_only=True)["params"], params)


def newest_checkpoint(folder: Path) -> int:
    """Its step; -1 if there is none. It may not be complete."""
    found = folder.glob("checkpoints/step-*")
    return max((int(path.name.removeprefix("step-")) for path in found), default=-1)
