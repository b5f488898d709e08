"""What nodes print that somebody starts by hand: to whom to go, who came and went, how it ended."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiment.served_at_work import Play, Stage, flags, nbytes_of
from gradwire.experiment.processes.replay import replay
from listing import live_glob

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
ANY = "tcp://127.0.0.1:0"
NOBODY = "tcp://127.0.0.1:9"  # no scheduler is there
SETTINGS = {"synchronization": "asp", "architecture": "parameter_server(1)"}


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


class Hands:
    """Start nodes, one at a time, in one folder."""

    def __init__(self, stage: Stage, folder: Path, **settings: object) -> None:
        self.stage, self.folder = stage, folder
        self.settings = {**SETTINGS, "eval_every": settings["steps"], **settings}
        self.scheduler = ANY

    def start(self, role: str, *more: str, **settings: object) -> Play:
        usual = ("--scheduler", self.scheduler, *flags(**{**self.settings, **settings}))
        play = self.stage.start(self.folder, "ps", role, *usual, *more)
        if role == "scheduler":
            play.until(lambda: "\n" in play.said, "its first line")
            found = re.search(r"Start them with --scheduler (tcp://\S+)", play.said)
            assert found, play.said
            self.scheduler = found[1]  # as a person would
        return play


def lines(play: Play, seconds: float = 30.0) -> tuple[int, list[str]]:
    code, said = play.end(seconds)
    assert "Traceback" not in said
    return code, said.splitlines()


def test_a_run_that_goes_well(stage: Stage, tmp_path: Path) -> None:
    with stage.start(tmp_path, "ps", "keys", "job.key") as play:
        code, said = lines(play)
    assert code == 0
    assert said == [
        "job.key holds the keys of one job. Copy it to all its nodes, and let nobody else read it; "
        "each takes it with --keys job.key"
    ]
    hands, keys = Hands(stage, tmp_path, steps=20), ("--keys", "job.key")
    with (
        hands.start("scheduler", "--out", "run", *keys) as scheduler,
        hands.start("server", *keys) as server,
    ):
        text = "scheduler: waiting, 0 of 2 workers are there\n"
        scheduler.until(lambda: text in scheduler.said, "news of the server")
        with (
            hands.start("worker", "--number", "1", *keys) as other,
            hands.start("worker", "--number", "0", *keys) as worker,
        ):
            ended = [lines(play) for play in (scheduler, server, worker, other)]
    assert [code for code, _ in ended] == [0] * 4, ended
    said, at = ended[0][1], hands.scheduler
    assert said[0] == (
        "scheduler: waiting for 2 workers and 1 server. "
        f"Start them with --scheduler {at} --keys job.key"
    )
    begins = "scheduler: the training begins; the record is in run"
    assert said.index("scheduler: all are there") < said.index(begins)
    assert any(line.startswith("run: step 20/20, test accuracy") for line in said)
    assert said[-1] == "Records: run"
    said = ended[1][1]
    pattern = rf"server: at tcp://127\.0\.0\.1:\d+, joining the scheduler at {at}"
    assert re.fullmatch(pattern, said[0]), said
    assert said[-2:] == [
        "server: joined as server 0",
        "server 0: done; the scheduler has the record",
    ]
    for number, (_, said) in enumerate(ended[2:]):
        assert said[0] == f"worker: joining the scheduler at {at}"
        assert said[-2] == f"worker: joined as worker {number}"
        assert said[-1] == f"worker {number}: done; the scheduler has the record"


@pytest.mark.slow
def test_who_is_refused_who_is_lost_and_who_stops(stage: Stage, tmp_path: Path) -> None:
    hands = Hands(stage, tmp_path, steps=10_000_000)
    out = ("--out", "run")
    again = "start all nodes again, scheduler and servers with --resume run"
    with (
        hands.start("scheduler", *out, "--silence", "3s") as scheduler,
        hands.start("server", *out) as server,
        hands.start("worker", "--number", "0") as worker,
        hands.start("worker", "--number", "1") as killed,
    ):
        scheduler.until(lambda: "all are there" in scheduler.said, "everybody")
        with (
            hands.start("worker", "--join-wait", "3s") as superfluous,
            hands.start("worker", batch_size=9) as different,
        ):
            code, said = lines(different)
            assert code == 2
            why = "it is of another job: it has other settings"
            assert said[-1].startswith(f"error: the scheduler refuses this worker: {why}")
            code, said = lines(superfluous)
            assert code == 3
            why = "all ranks are taken; it waits until one is lost"
            assert said[1] == f"worker: waiting, {why}"
            assert said[2].startswith("error: this worker could not join at the scheduler: " + why)
        os.kill(killed.pid, signal.SIGKILL)
        scheduler.until(lambda: "was lost" in scheduler.said, "the loss of a worker")
        os.kill(scheduler.pid, signal.SIGINT)
        ended = [lines(play) for play in (scheduler, server, worker)]
    assert [code for code, _ in ended] == [130, 3, 3], ended
    *others, stopped = ended[0][1]
    for pattern in (
        r"scheduler dropped a message from a node that is not in the job.*",
        r"worker 1 was lost after \d+\.\d s: nothing was received from it for 3 s",
    ):
        assert any(re.fullmatch(pattern, line) for line in others), others
    assert stopped == f"stopped by SIGINT. Resume from the state of the servers: {again}"
    # They would train on to the end, for nobody.
    why = f"the scheduler was lost, or told to stop. Resume from the state of the servers: {again}"
    assert ended[1][1][-1] == f"error: asp on parameter_server stopped: {why}"
    pattern = r"error: asp on parameter_server stopped in step \d+ of 10000000: "
    assert re.fullmatch(pattern + re.escape(why), ended[2][1][-1]), ended[2]
    # And so it goes on.
    hands.scheduler, before = ANY, set(tmp_path.glob("run/servers/*"))
    resume = ("--resume", "run")
    with (
        hands.start("scheduler", *resume) as scheduler,
        hands.start("server", *resume) as server,
        hands.start("worker") as worker,
        hands.start("worker") as other,
    ):
        scheduler.until(lambda: num_bytes_heard(tmp_path, before) > 4000, "training")
        for play in (scheduler, server, worker, other):
            assert play.code is None, play.said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("synchronization", "later", "codes"),
    [("asp", 2, [130, 3, 3, 3]), ("bsp", 1, [130, 130, 130, 130])],
)
def test_device_and_threads_are_every_nodes_own(
    stage: Stage, tmp_path: Path, synchronization: str, later: int, codes: list[int]
) -> None:
    """Also when the run goes on, perhaps with others."""
    hands = Hands(stage, tmp_path, steps=10_000_000, synchronization=synchronization)

    def train(where: tuple[str, ...], threads: int, before: set[Path]) -> None:
        hands.scheduler = ANY
        with (
            hands.start("scheduler", *where) as scheduler,
            hands.start("server", *where, threads=threads) as server,
            hands.start("worker", threads=3) as worker,
            hands.start("worker") as other,
        ):
            scheduler.until(lambda: num_bytes_heard(tmp_path, before) > 4000, "training")
            os.kill(scheduler.pid, signal.SIGINT)
            ended = [lines(play) for play in (scheduler, server, worker, other)]
        assert [code for code, _ in ended] == codes, ended

    train(("--out", "run"), 2, set())
    train(("--resume", "run"), later, set(tmp_path.glob("run/servers/*")))
    assert "threads = 1\n" in (tmp_path / "run" / "config.toml").read_text()


def test_a_run_that_is_refused_when_all_are_there_has_no_record(
    stage: Stage, tmp_path: Path
) -> None:
    hands = Hands(stage, tmp_path, steps=20)
    (tmp_path / "here").write_text("a file, where no folder can be")
    with (
        hands.start("scheduler", "--out", "here/run") as scheduler,
        hands.start("server") as server,
        hands.start("worker") as worker,
        hands.start("worker") as other,
    ):
        ended = [lines(play) for play in (scheduler, server, worker, other)]
    assert [code for code, _ in ended] == [2] * 4, ended
    said = ended[0][1]
    assert "scheduler: all are there" in said
    assert not any("the record is in" in line for line in said), said


def test_its_engine_is_that_of_real_processes(stage: Stage, tmp_path: Path) -> None:
    """Nobody has to say so: settings that only they have are taken."""
    hands, record = Hands(stage, tmp_path, steps=20), "--record-order"
    with (
        hands.start("scheduler", "--out", "run", record) as scheduler,
        hands.start("server", record) as server,
        hands.start("worker", record) as worker,
        hands.start("worker", record) as other,
    ):
        ended = [lines(play) for play in (scheduler, server, worker, other)]
    assert [code for code, _ in ended] == [0] * 4, ended
    assert replay(tmp_path / "run").is_equal


def num_bytes_heard(folder: Path, before: set[Path]) -> int:
    """By servers that were not there before."""
    journals = live_glob(folder, "run/servers/[0-9]*/journal-*.log")
    return sum(nbytes_of(path) for path in journals if path.parent not in before)


@pytest.mark.parametrize(
    ("role", "more", "code", "message"),
    [
        ("worker", ("--scheduler", "127.0.0.1"), 2, "'127.0.0.1' is no address; expected tcp://"),
        ("worker", ("--scheduler", "tcp://127.0.0.1:99999"), 2, "nobody can connect to 'tcp://127"),
        ("server", ("--scheduler", "tcp://127.0.0.1"), 2, "'tcp://127.0.0.1' is no address"),
        ("worker", ("--scheduler", "tcp://10.0.0.1:9092"), 2, "gradwire ps keys FILE"),
        ("server", ("--scheduler", "tcp://10.0.0.1:9092"), 2, "gradwire ps keys FILE"),
        ("scheduler", ("--scheduler", "tcp://0.0.0.0:9092"), 2, "gradwire ps keys FILE"),
        ("scheduler", ("--keys", "nowhere"), 2, "there are no keys in nowhere. Make them once"),
        ("keys", (), 2, "say where to write them: gradwire ps keys FILE"),
    ],
)
def test_what_cannot_be_is_said_at_once_and_in_one_line(
    stage: Stage, tmp_path: Path, role: str, more: tuple[str, ...], code: int, message: str
) -> None:
    with stage.start(tmp_path, "ps", role, *flags(**SETTINGS), *more) as play:
        found, said = lines(play, 20)
    assert found == code, said
    (line,) = said
    assert line.startswith("error: ")
    assert message in line


def test_who_waits_in_vain(stage: Stage, tmp_path: Path) -> None:
    usual = (*flags(**SETTINGS), "--join-wait", "500ms")
    wildcard = ("--scheduler", "tcp://0.0.0.0:0", "--insecure")
    with (
        stage.start(tmp_path, "ps", "worker", *usual, "--scheduler", NOBODY) as worker,
        stage.start(tmp_path, "ps", "scheduler", *usual, *wildcard) as scheduler,
    ):
        code, said = lines(worker)
        assert code == 3
        assert said == [
            f"worker: joining the scheduler at {NOBODY}",
            "error: this worker could not join at the scheduler: it does not answer. Is it "
            f"running, is this its address, and are the keys the same? (after 0.5 s, {NOBODY})",
        ]
        code, said = lines(scheduler)
    assert code == 3
    pattern = r".* Start them with --scheduler tcp://HOST:\d+ --insecure, where HOST is how they .*"
    assert re.fullmatch(pattern, said[0]), said
    assert said[1].startswith("warning: without keys everybody on the network can join")
    missing = "0 of 1 servers are there, 0 of 2 workers are there"
    assert said[2].startswith(f"error: the job is not complete: {missing} (after 0.5 s")
