"""Two machines: network namespaces with an address each, joined by a cable, sharing no folder."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from experiment.processes_at_work import FLAGS, TORCHRUN, Command, is_saved, simulated

ADDRESSES = ("10.213.77.1", "10.213.77.2")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of namespaces, in each of which is one end of a cable, called wire."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and the command ip")
    names = [f"gradwire-{os.getpid()}-{host}" for host in "ab"]
    made: list[str] = []
    try:
        for name in names:
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
            made.append(name)
        first, second = names
        ends = ("name", "wire", "netns", first, "type", "veth", "peer", "name", "wire")
        _ip("link", "add", *ends, "netns", second)
        for name, address in zip(names, ADDRESSES):
            for link in ("lo", "wire"):
                _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
        yield names
    finally:
        for name in made:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)  # with it goes its end of the cable


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@pytest.mark.slow
def test_two_hosts_end_in_the_simulators_bits(hosts, tmp_path, monkeypatch):
    commands: list[Command] = []
    nodes = ("--nnodes", "2", "--nproc-per-node", "1")
    where = ("--master-addr", ADDRESSES[0], "--master-port", "29400")
    job = ("-m", "gradwire", "run", "--engine", "process", *FLAGS, "--steps", "60", "--out", "run")
    try:
        for number, host in enumerate(hosts):
            folder = tmp_path / host
            folder.mkdir()
            monkeypatch.chdir(folder)
            own = (*nodes, "--node-rank", str(number), *where)
            inside = ("ip", "netns", "exec", host)
            environment = {"GLOO_SOCKET_IFNAME": "wire"}
            commands.append(Command(*inside, *TORCHRUN, *own, *job, env=environment))
        ended = [command.end(90) for command in commands]
    finally:
        for command in commands:
            command.__exit__()
    assert [code for code, _ in ended] == [0, 0], ended
    params = simulated(workers=2, steps=60)
    first, second = (tmp_path / host / "run" for host in hosts)
    assert is_saved(first, params)
    records = ["complete", "config.toml", "metrics.jsonl", "model.pt", "rank-0.pt", "summary.json"]
    assert _files(first) == records
    assert _files(second) == ["config.toml", "rank-1.pt"]


def _files(folder: Path) -> list[str]:
    return sorted({path.name for path in folder.rglob("*") if path.is_file()})
