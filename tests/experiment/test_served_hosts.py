"""Scheduler, servers and workers on two machines: network namespaces joined by a cable."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import gradwire
from experiment.served_at_work import SETTINGS, Play, Stage, flags
from experiment.test_processes_hosts import ADDRESSES
from experiment.test_processes_hosts import hosts as hosts

SCHEDULER = f"tcp://{ADDRESSES[0]}:9192"


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.mark.slow
def test_only_members_get_in(hosts, stage, tmp_path):
    keys = tmp_path / "keys"
    for name in ("keys", "others"):
        with stage.start(tmp_path, "ps", "keys", str(tmp_path / name)) as play:
            code, said = play.end()
            assert code == 0
            assert f"--keys {tmp_path / name}" in said.replace("\n", "")
    settings = {"steps": 150, "compression": "ef(topk(0.1))"}

    def start(host: int, folder: str, *arguments: str, key: Path | None = keys) -> Play:
        own = () if key is None else ("--keys", str(key))
        command = ("ps", *arguments, "--scheduler", SCHEDULER, *flags(**settings), *own)
        return stage.start(tmp_path / folder, *command, namespace=hosts[host])

    # Without keys nothing begins.
    with start(1, "naked", "worker", key=None) as naked:
        code, said = naked.end(10)
        assert code == 2
        assert "gradwire ps keys FILE" in said
        assert "Traceback" not in said
    with (
        start(0, "scheduler", "scheduler", "--out", "run") as scheduler,
        start(1, "stranger", "worker", "--join-wait", "3s", key=tmp_path / "others") as stranger,
        start(1, "insecure", "worker", "--join-wait", "3s", "--insecure", key=None) as insecure,
        start(0, "server0", "server", "--number", "0", "--out", "run") as server,
        start(1, "worker0", "worker", "--number", "0") as worker,
        start(1, "server1", "server", "--number", "1") as other,
    ):
        refused = [play.end(20) for play in (stranger, insecure)]
        with start(0, "worker1", "worker", "--number", "1") as last:  # now the job is complete
            ended = [play.end(30) for play in (scheduler, server, worker, other, last)]
    assert [code for code, _ in ended] == [0] * 5, ended
    for code, said in refused:
        assert code in (2, 3), said
        assert "could not join at the scheduler" in said
        assert "Traceback" not in said
    folder = tmp_path / "scheduler" / "run"
    params = torch.load(folder / "model.pt", weights_only=True)["params"]
    chosen = {**SETTINGS, **settings, "compute": "fixed(0.001)"}
    assert torch.equal(params, gradwire.simulate(**chosen).params)


@pytest.mark.slow
def test_insecure_must_be_asked_for(hosts, stage, tmp_path):
    settings = {"steps": 20, "workers": 1, "architecture": "parameter_server"}

    def start(host: int, role: str) -> Play:
        command = ("ps", role, "--scheduler", SCHEDULER, *flags(**settings), "--insecure")
        return stage.start(tmp_path / role, *command, namespace=hosts[host])

    with (
        start(0, "scheduler") as scheduler,
        start(1, "server") as server,
        start(0, "worker") as worker,
    ):
        ended = [play.end(30) for play in (scheduler, server, worker)]
    assert [code for code, _ in ended] == [0] * 3, ended
