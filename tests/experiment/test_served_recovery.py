"""Asynchronous runs with servers whose scheduler or launcher is killed: nobody leaves a checkpoint.

With `--durable` the next job has every update that was acknowledged.
"""

import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiment.served_at_work import Play, Stage, are_gone, flags, nbytes_of
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.experiment.processes.state.recovery import (
    INITIAL_CHECKPOINT,
    SERVER_STATE_STEP,
    initial_checkpoint,
    open_store,
    recover,
)
from gradwire.experiment.run.record import Record
from gradwire.experiment.run.setup import prepare
from gradwire.runtime.durable import journal
from gradwire.training.wire import PushHeader
from listing import live_glob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
NUM_STEPS = 300
SERVERS = (2, 3)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def start(stage: Stage, folder: Path, *more: str, **settings: Any) -> Play:
    chosen = flags(steps=NUM_STEPS, eval_every=NUM_STEPS, **settings)
    return stage.run("--engine", "process", *chosen, "--out", str(folder), "--durable", *more)


def num_pushes(folder: Path) -> dict[int, int]:
    """By server: the updates that its store has, counted by hand. A push has one part here."""
    found = {}
    for path in sorted(folder.glob("servers/*-*")):
        store = open_store(path, 10.0)
        began = None
        if store.state is not None:
            began = store.state["state"]
        elif (path / INITIAL_CHECKPOINT).exists():
            began = initial_checkpoint(path, None)
        arrivals = [journal.decode(body, HEADERS) for body in store.bodies]
        headers = [getattr(arrival.message, "header", None) for arrival in arrivals]
        num_since = sum(isinstance(header, PushHeader) for header in headers)
        num_before = 0 if began is None else began["role"]["memory"]["updates"]
        found[int(path.name.split("-")[0])] = num_before + num_since
        store.close()
    return found


def journal_nbytes(folder: Path) -> int:
    """Of the server that has written fewest."""
    found = Counter[str]()
    for path in live_glob(folder, "servers/*/journal-*.log"):
        found[path.parent.name] += nbytes_of(path)
    return min(found.values()) if len(found) == len(SERVERS) else 0


def num_states(folder: Path) -> int:
    """Of the server that has saved fewest."""
    paths = live_glob(folder, "servers/*/state-*.pt")
    newest = {path.parent.name: int(path.stem.split("-")[1]) for path in paths}
    return min(newest.values()) if len(newest) == len(SERVERS) else 0


def num_recovered(folder: Path) -> dict[int, int]:
    place = folder / "checkpoints" / "step-000000"
    assert place.is_dir()
    saved = {rank: Checkpoints(folder, rank).load().states[SERVER_STATE_STEP] for rank in SERVERS}
    return {rank: one["role"]["memory"]["updates"] for rank, one in saved.items()}


def kill_all(play: Play) -> None:
    nodes = play.nodes()
    os.kill(play.pid, signal.SIGKILL)
    play.end(10)
    assert are_gone(list(nodes.values()))


def goes_on_to_its_end(play: Play, folder: Path) -> None:
    code, said = play.end()
    assert code == 0, said
    assert "Traceback" not in said, said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["resumed_from_servers"]
    assert summary["messages_sent"] < 4 * 2 * NUM_STEPS  # it did not begin anew
    assert not (folder / "servers").exists()


@pytest.mark.slow
def test_no_acknowledged_update_is_lost_with_the_launcher(stage, tmp_path):
    folder = tmp_path / "run"
    every = ("--checkpoint-every", "60s")  # all is in the journal
    with start(stage, folder, *every, synchronization="asp") as play:
        play.until(lambda: journal_nbytes(folder) > 500_000, "training")
        kill_all(play)
    first = num_pushes(folder)
    assert min(first.values()) > 10
    assert not (folder / "checkpoints").exists()
    every = ("--checkpoint-every", "0.1s")  # states, and what came since
    with stage.run("--resume", str(folder), "--durable", *every) as play:
        play.until(lambda: num_states(folder) > 3, "states of the next job, with pushes")
        kill_all(play)
    assert num_recovered(folder) == first
    second = num_pushes(folder)
    assert all(second[rank] > first[rank] for rank in SERVERS)
    with stage.run("--resume", str(folder), "--durable") as play:
        goes_on_to_its_end(play, folder)
    assert num_recovered(folder) == second


@pytest.mark.slow
def test_no_acknowledged_update_is_lost_with_the_scheduler(stage, tmp_path):
    folder, copy = tmp_path / "run", tmp_path / "copy"
    more = ("--checkpoint-every", "60s", "--restarts", "1")
    with start(stage, folder, *more, synchronization="asp") as play:
        play.until(lambda: journal_nbytes(folder) > 500_000, "training")
        shutil.copytree(folder / "servers", copy / "servers")
        os.kill(play.nodes()["scheduler"], signal.SIGKILL)
        goes_on_to_its_end(play, folder)
        assert "starting again" in play.said
    pushed, recovered = num_pushes(copy), num_recovered(folder)  # more may have come since
    assert min(pushed.values()) > 10
    assert all(recovered[rank] >= pushed[rank] for rank in SERVERS)


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.slow
def test_what_a_server_cannot_read_any_more_is_said(stage, tmp_path):
    """Of one server the journal of a job, then its checkpoint: nothing begins anew in silence."""
    folder, copy = tmp_path / "run", tmp_path / "copy"
    with start(stage, folder, "--checkpoint-every", "60s", synchronization="asp") as play:
        play.until(lambda: journal_nbytes(folder) > 200_000, "training")
        kill_all(play)
    shutil.copytree(folder, copy)
    (log,) = folder.glob("servers/3-*/journal-*.log")
    damage(log)
    with stage.run("--resume", str(folder), "--durable") as play:
        code, said = play.end()
    assert code == 2, said
    assert f"server 1: {log}: the record at byte" in said
    assert f"gradwire run --resume {folder} --restart" in said
    assert log.exists()
    # Both have a checkpoint; one is damaged.
    before = set(copy.glob("servers/*-*"))
    with stage.run("--resume", str(copy), "--durable", "--checkpoint-every", "60s") as play:
        play.until(lambda: not any(map(Path.exists, before)), "the next job")
        play.until(lambda: journal_nbytes(copy) > 50_000, "training")
        os.kill(play.pid, signal.SIGTERM)
        code, said = play.end()
    assert code == 128 + signal.SIGTERM, said
    path = copy / "checkpoints" / "step-000000" / "rank-3.pt"
    damage(path)
    with stage.run("--resume", str(without_store(copy)), "--durable") as play:
        code, said = play.end()
    assert code == 2, said
    assert f"server 1: {path} is damaged: its checksum does not fit" in said
    with stage.run("--resume", str(copy), "--durable", "--restart") as play:
        code, said = play.end()
    assert code == 0, said
    assert f"server 1: {path} is damaged: its checksum does not fit" in said
    assert "the run begins again from step 0" in said
    assert not json.loads((copy / "summary.json").read_text())["resumed_from_servers"]


def without_store(folder: Path) -> Path:
    """The run, when one of its servers has nothing but its checkpoint. With its store that could be
    made again."""
    (store,) = folder.glob("servers/3-*")
    checkpoints = Checkpoints(folder, 3)
    experiment = prepare(Record(folder).config)
    damaged = (folder / "checkpoints" / "step-000000" / "rank-3.pt").read_bytes()
    found = recover(experiment, store.with_name("3-next"), checkpoints)
    assert len(found.skipped) == 1
    assert not found.lost
    assert checkpoints.load().states[SERVER_STATE_STEP]["role"]["memory"]["updates"] > 10
    (folder / "checkpoints" / "step-000000" / "rank-3.pt").write_bytes(damaged)
    shutil.rmtree(store)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("durable", [(), ("--durable",)])
@pytest.mark.parametrize(
    "synchronization", ["ssp(2)", "r2sp", "bsp(backup=1)", "bsp(timeout=0.05)"]
)
def test_what_servers_had_is_found_again(stage, tmp_path, synchronization, durable):
    folder = tmp_path / "run"
    chosen = flags(steps=NUM_STEPS, eval_every=NUM_STEPS, synchronization=synchronization)
    more = ("--checkpoint-every", "0.3s", *durable)
    with stage.run("--engine", "process", *chosen, "--out", str(folder), *more) as play:
        play.until(lambda: num_states(folder) > 1, "states")
        kill_all(play)
    with stage.run("--resume", str(folder), *more) as play:
        goes_on_to_its_end(play, folder)
