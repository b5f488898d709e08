"""`gradwire` with scheduler, servers and workers as real processes, for tests to kill and watch.

Everything is imported once, by one process that forks for every command and for every node that a
command starts: that is much quicker than to start an interpreter for each. What runs is the same,
and so are process ids, signals, exit codes and sockets.
"""

import ctypes
import importlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_TESTS = Path(__file__).resolve().parents[1]
SETTINGS: dict[str, Any] = {
    "model": "mlp((16,))",
    "batch_size": 8,
    "workers": 2,
    "threads": 1,
    "evaluation": "sequential",  # starts at once
    "architecture": "parameter_server(2)",
}


def flags(**settings: Any) -> list[str]:
    """Of a run with the usual settings, and these."""
    chosen = {**SETTINGS, **settings}
    return [
        text
        for name, value in chosen.items()
        for text in (f"--{name.replace('_', '-')}", f"{value}")
    ]


class Stage:
    """The process that forks. Leaves nothing behind."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        self._codes: dict[int, int] = {}
        self._lines: list[str] = []
        self._text = ""

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.communicate()

    def start(
        self,
        folder: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        namespace: str = "",
        before: str = "",
    ) -> "Play":
        """`gradwire ARGUMENTS`, in a folder, where its output goes too.

        `before` is a function ("module:name") that its processes call first.
        """
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / f"said-{time.monotonic_ns()}.txt"
        output.touch()
        order = {
            "argv": arguments,
            "folder": str(folder),
            "output": str(output),
            "env": dict(env or {}),
            "namespace": namespace,
            "before": before,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        while (pid := self._hear()) is None:
            pass
        return Play(self, pid, output)

    def run(self, *arguments: str, before: str = "") -> "Play":
        """`gradwire run --engine process ...`, in the folder given by --out or --resume."""
        flag = "--out" if "--out" in arguments else "--resume"
        folder = Path(arguments[arguments.index(flag) + 1])
        return self.start(folder.parent, "run", *arguments, before=before)

    def code(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """The exit code of a command that has ended; negative: a signal."""
        until = time.monotonic() + timeout_s
        while pid not in self._codes:
            left = max(0.0, until - time.monotonic())
            if not self._lines and not select.select([self._process.stdout], [], [], left)[0]:
                return None
            self._hear()
        return self._codes[pid]

    def _hear(self) -> int | None:
        """The next line: which process has begun, or None if one has ended."""
        assert self._process.stdout is not None
        if not self._lines:
            while not self._text.endswith("\n"):
                read = os.read(self._process.stdout.fileno(), 1 << 16).decode()
                assert read, "the process that forks is gone"
                self._text += read
            self._lines = self._text.splitlines()
            self._text = ""
        line = json.loads(self._lines.pop(0))
        if "ended" in line:
            self._codes[line["ended"]] = line["code"]
            return None
        begun: int = line["pid"]
        return begun


class Play:
    """A command under way."""

    def __init__(self, stage: Stage, pid: int, output: Path) -> None:
        self.pid, self._stage, self._output = pid, stage, output

    def __enter__(self) -> "Play":
        return self

    def __exit__(self, *_: object) -> None:
        nodes = list(self.nodes().values())
        for pid in (self.pid, *nodes):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._stage.code(self.pid, 10.0)
        assert are_gone([self.pid, *nodes])

    @property
    def code(self) -> int | None:
        return self._stage.code(self.pid)

    @property
    def said(self) -> str:
        return self._output.read_text()

    def nodes(self) -> dict[str, int]:
        """Process ids of the nodes that it started, by name: worker 0, server 1, scheduler."""
        found = {}
        with suppress(OSError):
            for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                with suppress(OSError):
                    name = Path(f"/proc/{child}/comm").read_text().strip()
                    if re.fullmatch(r"scheduler|(server|worker) \d+", name):
                        found[name] = int(child)
        return found

    def until(self, happens: Callable[[], Any], what: str, seconds: float = 90.0) -> None:
        limit = time.monotonic() + seconds
        while not happens():
            assert self.code is None, f"it ended before {what}: {self.code}\n{self.said}"
            assert time.monotonic() < limit, f"no {what} within {seconds} s\n{self.said}"
            time.sleep(0.003)

    def end(self, seconds: float = 150.0) -> tuple[int, str]:
        """Its exit code, and what it said."""
        code = self._stage.code(self.pid, seconds)
        assert code is not None, f"it did not end within {seconds} s\n{self.said}"
        return code, self.said


def nbytes_of(path: Path) -> int:
    """0 if it is not there any more: a server may have begun another journal."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def are_gone(pids: Sequence[int], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while any(map(is_running, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


# In the process that forks, and in those that it forks.


class _Forked:
    """As subprocess.Popen, but what it starts has been imported already."""

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str], stdout: Any, stderr: Any, **_: Any
    ) -> None:
        assert list(command[:3]) == [sys.executable, "-m", "gradwire"]
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        # Until a fork has handlers of its own signals wait; whoever starts it holds SIGINT itself.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        else:
            os.setsid()
            number = command[command.index("--number") + 1] if "--number" in command else ""
            name = f"{command[4]} {number}".strip().encode()
            ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
            _become(command[3:], env, None if stdout is None else stdout.fileno())

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _become(argv: Sequence[str], env: Mapping[str, str], output: int | None) -> NoReturn:
    """In a fork: the command, to its end."""
    from gradwire.cli import main

    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.environ.clear()
        os.environ.update(env)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
        main(argv)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    import gradwire.cli.front  # noqa: F401
    from gradwire.cli import processes as of_command  # noqa: F401
    from gradwire.experiment.processes import served  # noqa: F401
    from gradwire.experiment.processes.launch import children
    from gradwire.experiment.run.config import Config
    from gradwire.experiment.run.setup import prepare

    # The data is there. No gradient is computed: where torch knows CUDA no fork could do so then.
    prepare(Config(steps=1, compute="fixed(0.001)"))
    children.subprocess = type("_", (), {"Popen": _Forked, "DEVNULL": None})  # type: ignore
    nodes: set[int] = set()
    while True:
        if select.select([sys.stdin], [], [], 0.005)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                os.setsid()
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                if order["namespace"]:
                    with open(f"/var/run/netns/{order['namespace']}") as namespace:
                        ctypes.CDLL(None).setns(namespace.fileno(), 0)
                os.chdir(order["folder"])
                if order["before"]:
                    module, _, name = order["before"].partition(":")
                    getattr(importlib.import_module(module), name)()
                output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                _become(order["argv"], {**os.environ, **order["env"]}, output)
            nodes.add(pid)
            print(json.dumps({"pid": pid}), flush=True)
        for pid in list(nodes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                nodes.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                print(json.dumps({"ended": pid, "code": code}), flush=True)


if __name__ == "__main__":
    _serve()
