"""Temporary folders go with the process that made them, however it ends."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiment.processes_at_work import gradwire_run
from experiment.served_at_work import SETTINGS, flags
from gradwire.experiment.processes.launch.scratch import scratch_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfd, and looks into /proc")
LIMIT_S = 120.0
MAKER = """
import time
from gradwire.experiment.processes.launch.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "inside").mkdir()
    (folder / "inside" / "keys").write_text("secret")
    print(folder, flush=True)
    time.sleep(600)
"""


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_and_wait(pid: int, others: Sequence[int]) -> None:
    """Kills the first; the others must end by themselves."""
    descriptors = [os.pidfd_open(one) for one in others]
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + LIMIT_S
    try:
        for one, descriptor in zip(others, descriptors):
            left = max(0.0, until - time.monotonic())
            assert select.select([descriptor], [], [], left)[0], f"process {one} has not ended"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_it_is_there_until_the_end_of_the_block():
    with scratch_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert not folder.exists()


def test_it_goes_with_a_process_that_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        folder = Path(maker.stdout.readline().strip())
        assert (folder / "inside" / "keys").exists()
        kill_and_wait(maker.pid, children(maker.pid))
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["parameter_server(2)", pytest.param("ring", marks=pytest.mark.slow)],
)
def test_a_launcher_that_is_killed_leaves_no_process_and_no_folder(
    tmp_path, monkeypatch, architecture
):
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    num_nodes = SETTINGS["workers"] + (3 if "server" in architecture else 0)
    given = (*flags(architecture=architecture, steps=100_000), "--out", str(tmp_path / "run"))
    with gradwire_run("--engine", "process", *given) as command:
        pid, until = command.process.pid, time.monotonic() + LIMIT_S
        while len(found := children(pid)) < num_nodes + 2:  # two that remove folders
            assert command.process.poll() is None, command.end()
            assert time.monotonic() < until, found
            time.sleep(0.01)
        assert list(place.iterdir())
        kill_and_wait(pid, found)
    assert list(place.iterdir()) == []
