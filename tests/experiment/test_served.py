"""Scheduler, servers and workers as real processes: killed, stopped, started again, replayed."""

import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradwire
from experiment.processes_at_work import newest_checkpoint
from experiment.served_at_work import SETTINGS, Play, Stage, are_gone, flags, nbytes_of
from gradwire.experiment.processes.replay import replay
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.experiment.processes.state.recovery import SERVER_STATE_STEP
from listing import live_glob
from sampling import slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
HOLDING = 'parameter_server(2, optimizer="server")'
SQUEEZED = 'parameter_server(2, optimizer="server", answers="compressed")'


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def arguments(folder: Path, *more: str, **settings: Any) -> tuple[str, ...]:
    return "--engine", "process", *flags(**settings), "--out", str(folder), *more


def simulated(**settings: Any) -> Tensor:
    chosen = {**SETTINGS, "compute": "fixed(0.001)", **settings}
    return gradwire.simulate(**chosen).params


def params(folder: Path) -> Tensor:
    found: Tensor = torch.load(folder / "model.pt", weights_only=True)["params"]
    return found


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


def is_training(folder: Path, nbytes: int = 15_000) -> Callable[[], bool]:
    """Whether its servers have heard so much."""

    def is_so() -> bool:
        journals = live_glob(folder, "servers/*/journal-*.log")
        return len(journals) >= 2 and sum(map(nbytes_of, journals)) > nbytes

    return is_so


def kill(play: Play, name: str) -> int:
    play.until(lambda: name in play.nodes(), name)
    pid = play.nodes()[name]
    os.kill(pid, signal.SIGKILL)
    return pid


def checkpoint(folder: Path, step: int) -> Callable[[], bool]:
    """Whether a checkpoint is there, or was."""
    return lambda: newest_checkpoint(folder) >= step


def check_figures(folder: Path, steps: int, lives: int) -> None:
    """That servers have heard what lost workers sent, each push and answer of the same length.

    One of two workers took all steps, the other one some; if it came back it may have taken some
    of them twice, since it began where the slowest was.
    """
    found, rows = summary(folder), [json.loads(row) for row in metrics(folder)]
    push = found["parameters"] * 4 + 2 * 32
    pushes, answers = (sum(map(sum, part)) for part in on_links(found["bytes_by_link"]))
    assert steps < found["gradients"] < lives * steps
    assert pushes == pytest.approx(found["gradients"] * push, rel=0.01)
    assert answers == pytest.approx(pushes, rel=0.01)
    assert found["bytes_by_tensor"]["of workers that were lost"] > 0
    assert found["bytes_per_worker_step"] == pytest.approx(2 * push, rel=0.01)
    assert found["bytes_handed_over"] > found["bytes_sent"]
    assert found["training_time_s"] >= max(row["time_s"] for row in found["lost"])
    assert rows[-1]["bytes_sent"] == found["bytes_sent"]
    assert rows[-1]["time_s"] == found["training_time_s"]
    for name in ("step", "time_s", "bytes_sent"):
        assert [row[name] for row in rows] == sorted(row[name] for row in rows)


def on_links(bytes_by_link: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """From two workers to two servers, and back."""
    return [row[2:4] for row in bytes_by_link[:2]], [row[:2] for row in bytes_by_link[2:4]]


def metrics(folder: Path) -> list[str]:
    return (folder / "metrics.jsonl").read_text().splitlines()


# Workers.


@pytest.mark.slow
def test_ssp_goes_on_without_a_worker_that_is_killed_and_with_one_that_comes(stage, tmp_path):
    """All nodes are started by hand, with what ps-lite says in the environment."""
    config = tmp_path / "config.toml"
    settings = {**SETTINGS, "synchronization": "ssp(2)", "steps": 1000, "eval_every": 500}
    del settings["workers"], settings["architecture"]
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    config.write_text("\n".join(lines))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": "2",
        "DMLC_NUM_SERVER": "2",
    }

    def start(role: str, number: int = 0, *more: str) -> Play:
        own = {"DMLC_ROLE": role, "DMLC_WORKER_ID": str(number)}
        command = ("ps", "--config", str(config), *more)
        return stage.start(tmp_path / f"{role}{number}", *command, env={**job, **own})

    out = ("--out", "run")
    with (
        start("scheduler", 0, *out, "--silence", "1s") as scheduler,
        start("server", 0, *out) as server,
        start("server", 1) as other,
        start("worker", 0) as worker,
        start("worker", 1) as killed,
    ):
        folder = tmp_path / "server0" / "run"
        scheduler.until(lambda: _size(folder) > 4000, "training")
        os.kill(killed.pid, signal.SIGKILL)
        scheduler.until(lambda: "worker 1 was lost" in scheduler.said, "loss", 10)
        with start("worker", 1) as replaced:
            ended = [play.end() for play in (scheduler, server, other, worker, replaced)]
    assert [code for code, _ in ended] == [0] * 5, ended
    said = scheduler.said
    assert "worker 1 was lost after" in said
    assert "nothing was received from it for 1 s" in said
    assert "worker 1 is back at" in said
    assert all("Traceback" not in text for _, text in ended)
    found = summary(tmp_path / "scheduler0" / "run")
    (lost,) = found["lost"]
    assert (lost["rank"], lost["why"]) == (1, "nothing was received from it for 1 s")
    assert lost["back_s"] > lost["time_s"]
    assert found["config"]["workers"] == 2
    assert found["noted"]["ahead"]["max"] <= 2
    assert found["test_accuracy"] > 0.8
    socket.create_server(("127.0.0.1", port)).close()  # is free again


def _size(folder: Path) -> int:
    return sum(map(nbytes_of, live_glob(folder, "servers/*/journal-*.log")))


@pytest.mark.slow
def test_workers_are_replaced_or_leave_and_the_others_go_on(stage, tmp_path):
    replaced, left, backup = tmp_path / "asp", tmp_path / "ssp", tmp_path / "bsp"
    usual = {"steps": 500, "eval_every": 250}
    more = ("--restarts", "1", "--record-order")
    given = arguments(replaced, *more, synchronization="asp", **usual)
    with stage.run(*given) as play:
        play.until(is_training(replaced), "training")
        kill(play, "worker 1")
        code, said = play.end()
    assert code == 0, said
    assert "worker 1 was killed by SIGKILL; starting it again" in said
    assert "worker 1 is back at" in said
    check_figures(replaced, steps=500, lives=3)
    assert [row["rank"] for row in summary(replaced)["lost"]] == [1]
    with pytest.raises(ValueError, match="worker 1 was lost and came back"):
        replay(replaced)
    # One that is told to stop does so, without a wait for its silence.
    with stage.run(*arguments(left, synchronization="ssp(2)", **usual)) as play:
        play.until(is_training(left), "training")
        os.kill(play.nodes()["worker 1"], signal.SIGTERM)
        code, said = play.end()
    assert code == 0, said
    assert "worker 1 was lost after" in said
    assert "worker 1: stopped by SIGTERM" in said
    # And one that is one too many need not come back.
    given = arguments(backup, "--silence", "1s", synchronization="bsp(backup=1)", **usual)
    with stage.run(*given) as play:
        play.until(is_training(backup), "training")
        kill(play, "worker 0")
        code, said = play.end()
    assert code == 0, said
    assert "worker 0 was killed by SIGKILL" in said
    assert "Traceback" not in said, said
    assert not list(backup.glob("servers/*"))
    check_figures(backup, steps=500, lives=2)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["parameter_server(2)", HOLDING])
def test_bsp_stops_and_says_why(stage, tmp_path, architecture):
    folder = tmp_path / "run"
    given = arguments(folder, "--silence", "1s", architecture=architecture, steps=2000)
    with stage.run(*given) as play:
        play.until(checkpoint(folder, 400), "checkpoint")  # so all have that before it
        nodes = play.nodes()
        kill(play, "worker 1")
        began = time.monotonic()
        code, said = play.end(20)
        assert time.monotonic() - began < 10
        assert are_gone(list(nodes.values()), 1)
    assert code == 3, said
    *_, error, cause = said.splitlines()
    assert "bsp on parameter_server(2" in error
    assert "worker 1 was lost (" in error
    assert re.search(rf"Resume from step \d\d\d+: gradwire run --resume {folder}", error), error
    assert cause == "worker 1 was killed by SIGKILL"
    assert "rank" not in said
    assert "Traceback" not in said, said
    assert "stopped" in summary(folder)


def listening_port(pid: int) -> int:
    """Of the only TCP socket on which this process listens."""
    own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    (row,) = (row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own)
    return int(row[1].split(":")[1], 16)


@pytest.mark.slow
def test_others_on_this_machine_cannot_join_a_run(stage, tmp_path):
    """The nodes have keys that nobody else has."""
    folder = tmp_path / "run"
    settings = {"synchronization": "asp", "steps": 200, "eval_every": 200}
    with stage.run(*arguments(folder, "--silence", "60s", **settings)) as play:
        play.until(is_training(folder), "training")
        slow = play.nodes()["worker 1"]
        os.kill(slow, signal.SIGSTOP)  # so that the run is not over before
        scheduler = f"tcp://127.0.0.1:{listening_port(play.nodes()['scheduler'])}"
        command = ("ps", "worker", "--config", str(folder / "config.toml"))
        where = ("--scheduler", scheduler, "--number", "1", "--join-wait", "1s")
        with stage.start(tmp_path / "stranger", *command, *where) as stranger:
            code, said = stranger.end()
        os.kill(slow, signal.SIGCONT)
        assert code == 3, said
        assert "Do all nodes have the same keys?" in said
        code, said = play.end()
    assert code == 0, said
    assert summary(folder)["lost"] == []


# Servers, and everything together.


@pytest.mark.filterwarnings("ignore:.*momentum multiplies what feedback holds back")
@pytest.mark.parametrize(
    ("architecture", "scheduling", "durable"),
    [
        ("parameter_server(2)", "sequential", ()),
        slow(SQUEEZED, "sequential", ("--durable",)),
        slow("parameter_server(2)", "dear(1000)", ()),
        slow(HOLDING, "wfbp", ()),
    ],
)
def test_bsp_ends_in_the_same_bits_whatever_happens(
    stage, tmp_path, architecture, scheduling, durable
):
    folder = tmp_path / "run"
    settings = {
        "architecture": architecture,
        "scheduling": scheduling,
        "compression": "ef(topk(0.1))",
        "optimizer": "sgd(0.05, momentum=0.9)",
        "momentum_at": "after",
        "steps": 300,
        "eval_every": 10,
    }
    more = ("--restarts", "4", "--silence", "1s", *durable)
    with stage.run(*arguments(folder, *more, **settings)) as play:
        play.until(checkpoint(folder, 20), "checkpoint")
        kill(play, "server 0")
        play.until(checkpoint(folder, 50), "checkpoint")
        kill(play, "server 1")
        play.until(lambda: play.said.count("starting it again") == 2, "second server")
        kill(play, "server 1")  # while it comes back
        play.until(checkpoint(folder, 80), "checkpoint")
        kill(play, "worker 1")  # all begin again from a checkpoint
        play.until(lambda: "starting again" in play.said, "new beginning")
        play.until(checkpoint(folder, 120), "checkpoint")
        nodes = play.nodes()
        os.kill(play.pid, signal.SIGTERM)
        code, said = play.end(20)
        assert are_gone(list(nodes.values()), 1)
    assert code == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM. Resume from step" in said
    with stage.run("--resume", str(folder), "--restarts", "1", *durable) as play:
        play.until(checkpoint(folder, 200), "checkpoint")
        kill(play, "server 0")  # the checkpoint that it began with is gone
        code, said = play.end()
    assert code == 0, said
    assert "Traceback" not in said, said
    whole = gradwire.simulate(**{**SETTINGS, "compute": "fixed(0.001)", **settings})
    assert torch.equal(params(folder), whole.params)
    # Told again or not, a message counts once.
    assert summary(folder)["messages_sent"] == whole.summary["messages_sent"]


@pytest.mark.slow
@pytest.mark.parametrize("durable", [(), ("--durable",)])
def test_asp_counts_every_push_once(stage, tmp_path, durable):
    folder = tmp_path / "run"
    settings = {"synchronization": "asp", "steps": 300, "eval_every": 150}
    with stage.run(*arguments(folder, "--restarts", "3", *durable, **settings)) as play:
        for number in (0, 1, 0):
            play.until(is_training(folder, 20_000), "training")
            kill(play, f"server {number}")
            time.sleep(0.2)
        code, said = play.end()
    assert code == 0, said
    assert said.count("starting it again") == 3
    found = summary(folder)
    assert found["messages_sent"] == 4 * 2 * 300  # as many answers as pushes, and no more
    assert found["lost"] == []


@pytest.mark.slow
def test_a_worker_that_waits_in_vain_counts_as_lost(stage, tmp_path):
    folder = tmp_path / "run"
    settings = {"synchronization": "ssp(1)", "steps": 300, "eval_every": 300}
    with stage.run(*arguments(folder, "--timeout", "3s", "--silence", "30s", **settings)) as play:
        play.until(is_training(folder), "training")
        slow = play.nodes()["worker 1"]
        os.kill(slow, signal.SIGSTOP)
        play.until(lambda: "worker 0 was lost" in play.said, "its loss")
        os.kill(slow, signal.SIGCONT)
        code, said = play.end()
    assert code == 0, said
    assert "nothing has happened for 3 s" in said
    assert [row["rank"] for row in summary(folder)["lost"]] == [0]


@pytest.mark.slow
def test_a_worker_that_was_suspended_for_too_long_is_started_again(stage, tmp_path):
    folder = tmp_path / "run"
    settings = {"synchronization": "asp", "steps": 4000, "eval_every": 4000}
    more = ("--silence", "2s", "--restarts", "2")
    with stage.run(*arguments(folder, *more, **settings)) as play:
        play.until(is_training(folder), "training")
        slow = play.nodes()["worker 1"]
        os.kill(slow, signal.SIGSTOP)
        play.until(lambda: "worker 1 was lost" in play.said, "its loss")
        os.kill(slow, signal.SIGCONT)
        play.until(lambda: "worker 1 is back" in play.said, "its return")
        code, said = play.end()
    assert code == 0, said
    assert "worker 1: starting it again" in said


@pytest.mark.slow
def test_nobody_takes_work_of_others_for_silence(stage, tmp_path):
    """The scheduler hears nothing while all train, nor does who is done while another is not."""
    folder = tmp_path / "run"
    settings = {"synchronization": "asp", "steps": 300, "eval_every": 300}
    more = ("--timeout", "3s", "--silence", "30s")
    with stage.run(*arguments(folder, *more, **settings)) as play:
        play.until(is_training(folder), "training")
        slow = play.nodes()["worker 1"]
        os.kill(slow, signal.SIGSTOP)
        time.sleep(7)
        os.kill(slow, signal.SIGCONT)
        code, said = play.end()
    assert code == 0, said
    assert "lost" not in summary(folder) or not summary(folder)["lost"], said


@pytest.mark.slow
def test_without_its_scheduler_a_job_ends(stage, tmp_path):
    folder = tmp_path / "run"
    with stage.run(*arguments(folder, steps=100_000, eval_every=50)) as play:
        play.until(checkpoint(folder, 50), "checkpoint")
        nodes = play.nodes()
        kill(play, "scheduler")
        code, said = play.end(15)
        assert are_gone(list(nodes.values()), 1)
    assert code == 3
    assert said.splitlines()[-1] == "error: the scheduler was killed by SIGKILL"


# Signals.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("synchronization", "who", "number"),
    [
        ("asp", "", signal.SIGINT),
        slow("ssp(2)", "server 1", signal.SIGTERM),
        slow("bsp(backup=1)", "", signal.SIGINT),
    ],
)
def test_what_servers_have_is_left_after_a_signal(stage, tmp_path, synchronization, who, number):
    folder = tmp_path / "run"
    settings = {"synchronization": synchronization, "steps": 1500, "eval_every": 700}
    with stage.run(*arguments(folder, **settings)) as play:
        play.until(is_training(folder, 60_000), "training")
        nodes = play.nodes()
        os.kill(nodes.get(who, play.pid), number)
        code, said = play.end(20)
        assert are_gone(list(nodes.values()), 1)
    assert code == 128 + number, said
    text = f"Resume from the state of the servers: gradwire run --resume {folder}"
    assert said.splitlines()[-1] == f"stopped by {number.name}. {text}"
    saved = [Checkpoints(folder, rank).load().states[SERVER_STATE_STEP] for rank in (2, 3)]
    memories = [one["role"]["memory"] for one in saved]
    if synchronization == "asp":  # all workers came to the end of their steps
        assert memories[0]["updates"] == memories[1]["updates"] > 100
    with stage.run("--resume", str(folder)) as play:
        code, said = play.end()
    assert code == 0, said
    found = summary(folder)
    assert found["messages_sent"] < 4 * 2 * 1500  # it did not begin anew
    assert found["resumed_from_servers"]
    # Of each step since a push and an answer on two servers, besides the first pull.
    assert found["gradients"] * 4 <= found["messages_sent"] <= (found["gradients"] + 2) * 4
    assert found["bytes_per_worker_step"] == found["bytes_sent"] / found["gradients"]
    assert summary(folder)["test_accuracy"] > 0.8
    if "staleness" in found["noted"]:  # of the same gradients as the rest
        mean = found["noted"]["staleness"]["mean"]
        assert mean * 2 * found["gradients"] == pytest.approx(round(mean * 2 * found["gradients"]))
    # Its end is its end.
    before = (folder / "summary.json").read_bytes()
    with stage.run("--resume", str(folder)) as play:
        code, said = play.end()
    assert code == 0, said
    assert "test accuracy" in said
    assert said.splitlines()[-1] == "this run had finished; nothing was computed"
    assert (folder / "summary.json").read_bytes() == before


@pytest.mark.slow
def test_a_signal_is_not_recorded_as_a_loss(stage, tmp_path):
    folder = tmp_path / "run"
    with stage.run(*arguments(folder, steps=4000)) as play:
        play.until((folder / "config.toml").exists, "the folder")
        os.kill(play.pid, signal.SIGINT)
        code, said = play.end(20)
    assert code == 130, said
    assert "stopped by SIGINT" in said
    assert "lost" not in said
    assert not (folder / "summary.json").exists()


@pytest.mark.slow
def test_a_run_that_one_worker_has_finished_and_one_has_not_is_not_done(stage, tmp_path):
    """A signal comes when one has trained to the end and the other was slow."""
    folder = tmp_path / "run"
    settings = {"synchronization": "asp", "steps": 1200, "eval_every": 600}
    with stage.run(*arguments(folder, "--silence", "60s", **settings)) as play:
        play.until(is_training(folder, 20_000), "training")
        slow = play.nodes()["worker 1"]
        os.kill(slow, signal.SIGSTOP)
        sizes = [0]

        def is_at_rest():
            time.sleep(0.7)
            sizes.append(sum(map(nbytes_of, live_glob(folder, "servers/*/journal-*"))))
            return sizes[-1] == sizes[-2]

        play.until(is_at_rest, "worker 0 to come to its end")
        os.kill(slow, signal.SIGCONT)
        os.kill(play.pid, signal.SIGTERM)
        code, said = play.end(20)
    assert code == 128 + signal.SIGTERM, said
    assert "Resume from the state of the servers" in said
    assert not (folder / "model.pt").exists()
    with stage.run("--resume", str(folder)) as play:
        code, said = play.end()
    assert code == 0, said


# Order.


@pytest.mark.slow
@pytest.mark.parametrize("synchronization", ["asp", "ssp(2)"])
def test_a_recorded_order_is_replayed(stage, tmp_path, synchronization):
    folder = tmp_path / "run"
    settings = {"synchronization": synchronization, "steps": 120}
    with stage.run(*arguments(folder, "--record-order", "--restarts", "1", **settings)) as play:
        if synchronization == "asp":  # that a server is told again is all the same
            play.until(is_training(folder), "training")
            kill(play, "server 0")
        assert play.end()[0] == 0
    replayed = replay(folder)
    assert replayed.is_equal, replayed.differs
    assert torch.equal(replayed.run.params, params(folder))
    found, rows = summary(folder), [json.loads(row) for row in metrics(folder)]
    assert [row["step"] for row in rows] == list(range(12, 121, 12))
    # Bytes with what servers sent: of rank 0 alone half as many as in the end, and more since.
    total = rows[-1]["bytes_sent"]
    for before, row in pairwise(rows):
        assert row["bytes_sent"] - before["bytes_sent"] > 0.95 * total * 12 / (2 * 120)
    assert found["servers_restarted"] == ([0] if synchronization == "asp" else [])
    assert found["bytes_handed_over"] > found["bytes_sent"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_killed_whenever(stage, tmp_path, seed):
    draw = random.Random(seed)
    synchronization = draw.choice(["asp", "ssp(0)", "ssp(2)", "r2sp", "bsp(backup=1)", "bsp"])
    folder = tmp_path / "run"
    settings = {"synchronization": synchronization, "steps": 200, "eval_every": 10}
    settings |= {"architecture": draw.choice(["parameter_server(2)", HOLDING, SQUEEZED])}
    settings |= {"compression": "ef(topk(0.1))"}
    durable = draw.choice([(), ("--durable",)])
    # What is not on disk is lost if the worker that had sent it is killed, too.
    names = ["server 0", "server 1"] if synchronization == "bsp" or not durable else []
    names = names or ["server 0", "server 1", "worker 0", "worker 1"]
    more = ("--restarts", "9", "--silence", "1s", *durable)
    with stage.run(*arguments(folder, *more, **settings)) as play:
        play.until(lambda: len(play.nodes()) == 5, "nodes")
        for _ in range(3):
            time.sleep(draw.random())
            pid = play.nodes().get(draw.choice(names))
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        code, said = play.end()
    assert code == 0, said
    assert "Traceback" not in said, said
    if synchronization == "bsp":
        assert torch.equal(params(folder), simulated(**settings))
