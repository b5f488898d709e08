"""The soak finds what it looks for, and a short one passes. `make soak` runs a long one."""

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from soak import actions, checks, watch
from soak.actions import Broken
from soak.jobs import JOBS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
_RUN = Path(__file__).with_name("run.py")


def ended(said: str = "", **more: Any) -> Any:
    return SimpleNamespace(**{"said": said, "had_keys": True, "job": JOBS[0], **more})


def test_what_is_drawn_follows_from_the_seed() -> None:
    drawn = [
        [actions.draw(rng, job, True) for job in JOBS * 50]
        for rng in (random.Random("3/7"), random.Random("3/7"), random.Random("3/8"))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    kinds = {(action.kind, action.role) for action in drawn[0]}
    roles = {"worker", "server", "scheduler", "launcher", "rank"}
    assert {role for kind, role in kinds if kind == actions.KILL} == roles
    assert {kind for kind, _ in kinds} >= {actions.FULL, actions.GARBAGE, actions.HELLOS, "SIGINT"}


def test_ends_that_nothing_explains_are_found() -> None:
    checks.check_exit(ended(), 0, [])
    checks.check_exit(ended(), 3, ["SIGKILL worker 1"])
    checks.check_exit(ended(), 2, ["full disk for 2.0 s"])
    for launch, code, done in (
        (ended(), 1, ["SIGKILL worker 1"]),
        (ended(), 2, ["SIGKILL worker 1"]),
        (ended(), 3, ["hellos to each server"]),
        (ended(), 3, ["garbage to each server"]),
        (ended("Traceback (most recent call last)"), 0, []),
    ):
        with pytest.raises(Broken):
            checks.check_exit(launch, code, done)


def test_processes_and_files_that_are_left_are_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checks, "_END_S", 0.2)
    mark = f"test-{os.getpid()}"
    launch = ended(mark=mark, temporary=tmp_path)
    checks.check_nothing_left(launch)
    environment = {**os.environ, watch.MARK: mark}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            assert watch.wait_until(lambda: process.pid in watch.find(mark), 60.0)
            with pytest.raises(Broken, match="processes are left"):
                checks.check_nothing_left(launch)
        finally:
            process.kill()
    (tmp_path / "gradwire-abc").mkdir()
    with pytest.raises(Broken, match="gradwire-abc"):
        checks.check_nothing_left(launch)


@pytest.mark.slow
def test_a_short_soak_passes() -> None:
    began_s = time.monotonic()
    command = [sys.executable, str(_RUN), "--seconds", "60", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1: " in done.stdout
    assert re.search(r"[1-9]\d* actions in", done.stdout), "nothing was done"
    assert time.monotonic() - began_s > 60
