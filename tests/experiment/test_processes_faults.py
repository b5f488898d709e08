"""Real processes are killed, stopped and started again: the same bits come out, nothing stays."""

import json
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from experiment.processes_at_work import (
    FLAGS,
    TORCHRUN,
    Command,
    are_gone,
    gradwire_run,
    is_saved,
    simulated,
)
from gradwire.experiment.processes.launch.children import WRONG

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def test_a_rank_that_is_killed_starts_again_and_all_end_in_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    steps = 400  # so many that it does not come to its end before it is killed
    new = ("--engine", "process", "--workers", "2", *FLAGS, "--steps", str(steps))
    with gradwire_run(*new, "--out", str(folder), "--restarts", "1") as command:
        command.wait_for_step(folder, 100)
        first = list(command.ranks.values())
        os.kill(command.ranks[1], signal.SIGKILL)
        assert are_gone(first)
        code, said = command.end()
    assert code == 0, said
    assert said.count("rank 1 was lost") == 1
    assert "starting again (1 of 1)" in said
    assert "Traceback" not in said
    (resumed,) = json.loads((folder / "summary.json").read_text())["resumed"]
    assert 0 < resumed < steps
    assert is_saved(folder, simulated(workers=2, steps=steps))


@pytest.mark.long
def test_killed_stopped_and_started_again_it_ends_in_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    steps = 2500  # so many that it does not come to its end before it is killed
    new = ("--engine", "process", "--workers", "2", *FLAGS, "--steps", str(steps))
    new += ("--out", str(folder))
    # A rank that is killed ends all of them; they start again as often as they may.
    with gradwire_run(*new, "--restarts", "1") as command:
        command.wait_for_step(folder, 100)  # so all have one before it
        first = list(command.ranks.values())
        os.kill(command.ranks[1], signal.SIGKILL)
        assert are_gone(first)
        command.wait_for_another(folder)  # of those that were started again
        os.kill(command.ranks[0], signal.SIGKILL)
        killed_s = time.monotonic()
        code, said = command.end()
        assert time.monotonic() - killed_s < 20
        assert code == 3
        assert said.count("rank 1 was lost") == said.count("rank 0 was lost") == 1
        assert "starting again (1 of 1)" in said
        assert "rank 0 was killed by SIGKILL" in said
        assert "Traceback" not in said
        assert f"gradwire run --resume {folder}" in said
        assert are_gone(list(command.ranks.values()))
    # A signal to one rank stops all of them, with a checkpoint.
    with gradwire_run("--resume", str(folder)) as command:
        command.wait_for_another(folder)
        ports = _ports(command.process.pid)
        os.kill(command.ranks[1], signal.SIGTERM)
        code, said = command.end()
        assert code == 128 + signal.SIGTERM
        assert "stopped by SIGTERM. Resume from step" in said
        assert "Traceback" not in said
        assert are_gone(list(command.ranks.values()))
        assert ports
        for port in ports:  # is free again
            socket.create_server(("127.0.0.1", port)).close()
    # torchrun starts them again, too.
    elastic = ("--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d")
    where = ("--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1")
    job = ("-m", "gradwire", "run", "--resume", str(folder))
    with Command(*TORCHRUN, *elastic, *where, *job, env={"GLOO_SOCKET_IFNAME": "lo"}) as command:
        command.wait_for_another(folder)
        os.kill(command.ranks[1], signal.SIGKILL)
        code, said = command.end()
        assert code == 0, said
        # Rank 0 says so, unless torchrun has noticed it first and sends SIGTERM.
        assert said.count("rank 1 was lost") <= 1
        assert "rank 1 was lost" in said or "stopped by SIGTERM" in said
        assert "test accuracy" in said
        assert "later steps of the interrupted run do not count" in " ".join(said.split())
    resumed = json.loads((folder / "summary.json").read_text())["resumed"]
    assert len(resumed) == 4
    assert 0 < resumed[0] < resumed[1] < resumed[2] < resumed[3] < steps
    assert is_saved(folder, simulated(workers=2, steps=steps))


@pytest.mark.slow
def test_under_torchrun_every_rank_names_the_setting_that_differs(tmp_path):
    """With torchrun's variables but not by torchrun: it ends a rank that may not have spoken yet
    as soon as the other one has failed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0, too, is a client of the store
        "GLOO_SOCKET_IFNAME": "lo",
    }
    run = [sys.executable, "-m", "gradwire", "run", "--engine", "process", *FLAGS]
    run += ["--out", str(tmp_path / "run")]
    with ExitStack() as stack:
        ranks = []
        for rank, seed in enumerate(("0", "5")):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(stack.enter_context(Command(*run, "--seed", seed, env=own)))
        ends = [command.end() for command in ranks]
    for code, said in ends:
        assert code == WRONG, said
        assert said.count("error: rank 1 has seed = 5 where rank 0 has seed = 0") == 1, said


@pytest.mark.slow
def test_no_rank_outlives_its_launcher(tmp_path):
    folder = tmp_path / "run"
    new = ("--engine", "process", "--workers", "2", *FLAGS, "--steps", "100000")
    with gradwire_run(*new, "--out", str(folder)) as command:
        command.wait_for_step(folder, 50)
        assert len(command.ranks) == 2
        command.process.kill()
        command.process.wait()
        assert are_gone(list(command.ranks.values()))


def _ports(pid: int) -> list[int]:
    """On which a process listens."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{name}")
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes and fields[3] == "0A":
            found.append(int(fields[1].partition(":")[2], 16))
    return found
