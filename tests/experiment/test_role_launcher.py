"""The launcher of scheduler, servers and workers: what it does when one dies before all joined."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from experiment.processes_at_work import gradwire_run
from experiment.served_at_work import flags
from gradwire.core.layout import NodeLayout
from gradwire.experiment.processes.launch import role_launcher
from gradwire.experiment.processes.launch.children import LOST, WRONG, Failure
from gradwire.experiment.processes.launch.role_launcher import Roles, launch_roles

# Nodes that need not import anything slow. What is awaited ends after LIMIT_S if nobody kills it.
WAIT_S, LIMIT_S = 300, 120
NODE = f"""
import json, os, signal, sys, time
role, number, goes_on = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
def leave(kind, message, code):
    with open(os.environ["GRADWIRE_REPORT"], "w") as file:
        json.dump({{"kind": kind, "message": message, "code": code}}, file)
    sys.exit(code)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def all_joined():
    open(os.environ["GRADWIRE_REPORT"].replace(".json", ".joined"), "w").close()
def wait():
    time.sleep({WAIT_S})
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(role_launcher, "_LEAVE_LIMIT_S", float(WAIT_S))
    monkeypatch.setattr(role_launcher, "_LOST_LIMIT_S", float(WAIT_S))


def nodes(
    script: str, restarts: int = 0, replaces_workers: bool = False
) -> tuple[Failure | None, list[str]]:
    said: list[str] = []

    def command(role: str, number: int, scheduler: str, keys: str, goes_on: bool) -> list[str]:
        own = (role, str(number), str(goes_on))
        return [sys.executable, "-S", "-c", NODE + script, *own]

    roles = Roles(NodeLayout(2, 1, 1), replaces_workers, replaces_servers=True)
    began = time.monotonic()
    failure = launch_roles(roles, command, restarts, said.append)
    assert time.monotonic() - began < LIMIT_S, "it waited for nodes that wait in vain"
    return failure, said


@pytest.mark.parametrize("replaces_workers", [False, True])
@pytest.mark.parametrize(
    ("role", "name"),
    [("worker", "worker 1"), ("server", "server 0"), ("scheduler", "the scheduler")],
)
def test_a_death_before_all_have_joined_ends_the_job_at_once(role, name, replaces_workers):
    script = f"if role == {role!r} and number == {int(name[-1] == '1')}: die()\nwait()"
    failure, said = nodes(script, replaces_workers=replaces_workers)
    assert failure == Failure(f"{name} was killed by SIGKILL", LOST, True)
    assert said == []


def test_what_a_node_reports_before_all_have_joined_ends_the_job_at_once():
    failure, said = nodes("if role == 'worker': leave('error', 'no data', 2)\nwait()", restarts=3)
    assert failure == Failure("no data", WRONG, False)
    assert said == []  # it would only fail again


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_death_before_all_have_joined_starts_the_job_again_at_once(role):
    script = f"""
if not goes_on and role == {role!r} and number == 0: die()
if not goes_on: wait()
"""
    failure, said = nodes(script, restarts=1)
    assert failure is None
    assert [text.splitlines()[-1] for text in said] == ["starting again"]


def test_a_server_that_dies_before_all_have_joined_is_started_again(tmp_path):
    """Alone: the others wait for it."""
    mark = tmp_path / "died"
    script = f"""
import pathlib
mark = pathlib.Path({str(mark)!r})
if role == "server" and not mark.exists():
    mark.touch()
    die()
if role == "server": mark.with_name("again").touch()
while not mark.with_name("again").exists(): time.sleep(0.01)
"""
    failure, said = nodes(script, restarts=1)
    assert failure is None
    assert said == ["server 0 was killed by SIGKILL; starting it again"]


def test_once_all_have_joined_the_scheduler_tells_why_the_job_ends(tmp_path):
    mark = tmp_path / "joined"
    script = f"""
import pathlib
mark = pathlib.Path({str(mark)!r})
if role == "scheduler":
    all_joined()
    mark.touch()
    while not mark.with_name("died").exists(): time.sleep(0.01)
    leave("lost", "worker 1 was lost in step 7", 3)
while not mark.exists(): time.sleep(0.01)
if role == "worker" and number == 1:
    mark.with_name("died").touch()
    die()
"""
    failure, _ = nodes(script)
    assert failure is not None
    assert failure.message.startswith("worker 1 was lost in step 7")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_real_nodes_are_not_waited_for(tmp_path):
    """Each takes seconds to import what it needs: it is killed before it joins."""
    given = (*flags(steps=20, eval_every=20), "--join-wait", "600s", "--out", str(tmp_path / "run"))
    for more, code in ((("--synchronization", "asp"), 3), (("--restarts", "1"), 0)):
        with gradwire_run("--engine", "process", *given, *more) as command:
            until = time.monotonic() + LIMIT_S
            while (worker := _find(command.process.pid, b"worker", b"1")) is None:
                assert time.monotonic() < until
                time.sleep(0.01)
            os.kill(worker, signal.SIGKILL)
            found, said = command.end(LIMIT_S)
            assert found == code, said
            assert "worker 1 was killed by SIGKILL" in said
            assert ("starting again" in said) == (code == 0)


def _find(launcher: int, role: bytes, number: bytes) -> int | None:
    """The process id of a node, once it runs."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if role in words and words[words.index(b"--number") + 1] == number:
            return int(child)
    return None
