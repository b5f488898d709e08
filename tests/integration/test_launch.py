"""gradwire launch: exit codes, signals, and that no process is left."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gradwire.cli.front import command
from gradwire.cli.launch import LaunchCommand

SRC = Path(__file__).parents[2] / "src"
LIMIT_S = 180.0  # on a loaded machine
SLOW = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import gradwire

how, folder = sys.argv[1], Path(sys.argv[2])
gradwire.init()
rank = gradwire.rank()
model = torch.nn.Linear(4, 2)
gradwire.broadcast_parameters(model.state_dict())
optimizer = gradwire.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    model.named_parameters(),
    "ef(sign)",
    architecture="parameter_server(1)",
    synchronization="asp" if how.startswith("asp") else "bsp",
)

def steps(count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()

steps(3)
if how == "fails" and rank == 1:
    sys.exit(5)
if how == "asp killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("waits", "polite"):
    if how == "polite":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (folder / f"there{rank}").touch()
    while True:
        time.sleep(0.1)
steps(3)
names = ("DMLC_ROLE", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
own = [os.environ[name] for name in ("DMLC_WORKER_ID", "RANK", "LOCAL_RANK")]
words = ["done", *[os.environ[name] for name in names], *own, optimizer.stats().steps]
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: others write to this pipe, too
"""


class Launched:
    """A command whose processes have a token in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)
        self.token = uuid.uuid4().hex
        paths = [str(SRC), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("DMLC_")},
            "PYTHONPATH": os.pathsep.join(paths),
            "GRADWIRE_TEST_TOKEN": self.token,
        }

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "gradwire", "launch", *arguments],
            env={**self.environment, **variables},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def local(self, how: str) -> "subprocess.Popen[str]":
        run = (sys.executable, str(self.script), how, str(self.folder))
        return self.start("--workers", "2", "--servers", "1", "--", *run)

    def left(self) -> list[int]:
        """The processes with the token."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if self.token.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    job = Launched(tmp_path)
    yield job
    left = job.left()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if sys.platform == "linux":
        assert not left


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_script_runs(launched):
    process = launched.local("runs")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    lines = sorted(line for line in out.splitlines() if line.startswith("done"))
    assert lines == [f"done worker 2 1 2 2 {rank} {rank} {rank} 6" for rank in range(2)]
    assert "error" not in err


@SLOW
def test_the_exit_code_is_that_of_the_worker_that_failed(launched):
    process = launched.local("fails")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 5
    assert "worker 1 ended with exit code 5" in err
    assert "NodeLost: worker 1 was lost" in err


@SLOW
def test_others_continue_if_servers_hold_the_model(launched):
    process = launched.local("asp killed")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert "worker 1 was killed by SIGKILL" in err
    assert out.count("done") == 1


@SLOW
@pytest.mark.parametrize(
    ("how", "number"),
    [("waits", signal.SIGTERM), ("waits", signal.SIGINT), ("polite", signal.SIGTERM)],
)
def test_signals_are_forwarded(launched, how, number):
    process = launched.local(how)
    wait_until(lambda: all((launched.folder / f"there{rank}").exists() for rank in range(2)))
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number


@SLOW
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_shell_has_started_is_ended(launched, number):
    """Two processes of a worker: a shell and its child. Nothing is left of them: see `launched`."""
    script = f"{sys.executable} {launched.script} waits {launched.folder}; true"
    process = launched.start("--workers", "1", "--", "bash", "-c", script)
    wait_until(lambda: (launched.folder / "there0").exists())
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number


@SLOW
def test_a_killed_launcher_leaves_nothing(launched):
    process = launched.local("waits")
    wait_until(lambda: all((launched.folder / f"there{rank}").exists() for rank in range(2)))
    process.kill()
    process.communicate(timeout=LIMIT_S)
    wait_until(lambda: not launched.left())


@SLOW
def test_a_command_that_does_not_exist(launched):
    process = launched.start("--workers", "1", "--", "no-such-command")
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 127
    assert "no-such-command cannot be started" in err


@SLOW
def test_nodes_are_started_by_hand(launched):
    host, port = "127.0.0.1", free_pair()
    variables = {
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    run = ("--", sys.executable, str(launched.script), "runs", str(launched.folder))
    nodes = [
        launched.start(**variables, DMLC_ROLE="scheduler"),
        launched.start("--role", "server", **variables),
        launched.start("--role", "worker", "--number", "1", *run, **variables),
        launched.start(*run, **variables, DMLC_ROLE="worker", DMLC_WORKER_ID="0"),
    ]
    ends = [node.communicate(timeout=LIMIT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0] * 4, ends
    assert "all workers have left" in ends[0][1]
    assert "done worker 2 1 2 1 0 0 0 6" in ends[3][0]


def free_pair() -> int:
    """A port that is free, as is the next one, where the system takes none by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        first, second = ("127.0.0.1", port), ("127.0.0.1", port + 1)
        with suppress(OSError), socket.create_server(first), socket.create_server(second):
            return port


def test_the_command_after_two_dashes_is_taken_as_it_is():
    made = command(["launch", "--workers", "4", "--", "python", "x.py", "--config", "a.toml"])
    assert isinstance(made, LaunchCommand)
    assert (made.workers, made.script) == (4, ("python", "x.py", "--config", "a.toml"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--workers", "2"], "after --"),
        (["--workers", "0", "--", "true"], "workers must be at least 1"),
        (["--servers", "0", "--", "true"], "servers must be at least 1"),
        (["--role", "server", "--", "true"], "runs no script"),
        (["--role", "worker", "--", "true"], "--number 0, or DMLC_WORKER_ID"),
        (["--role", "worker", "--number", "2", "--", "true"], "there is no worker 2"),
        (["--keys", "job.key", "--", "true"], "--keys goes with --role"),
    ],
)
def test_wrong_arguments(arguments, expected, monkeypatch):
    for name in [name for name in os.environ if name.startswith("DMLC_")]:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=expected.replace("(", "\\(")):
        command(["launch", *arguments])()
