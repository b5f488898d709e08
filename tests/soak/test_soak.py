"""The soak finds what it looks for, and a short one passes. `make soak` runs a long one."""

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.core.layout import NodeLayout
from gradwire.core.node import Framed
from gradwire.experiment.processes.headers import HEADERS
from gradwire.experiment.processes.launch.role_launcher import Roles
from gradwire.experiment.processes.state.checkpoints import Checkpoints
from gradwire.experiment.processes.state.recovery import SERVER_STATE_STEP, open_store, store_folder
from gradwire.experiment.run.record import restart_advice
from gradwire.runtime.durable import journal
from gradwire.runtime.durable.checkpoint import Store
from gradwire.runtime.process.transport import ARRIVED, DONE, Arrival
from gradwire.training.wire import PushHeader
from soak import actions, checks, keyless, rounds, watch
from soak.actions import Broken
from soak.jobs import JOBS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
_RUN = Path(__file__).with_name("run.py")


def ended(said: str = "", **more: Any) -> Any:
    return SimpleNamespace(**{"said": said, "had_complete": False, "job": JOBS[0], **more})


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


def test_lost_checkpoints_are_found() -> None:
    needs_consent = ended(restart_advice(Path("runs/a")))
    begins_again = ended("the run begins again from step 0", had_complete=True)
    for launch, code in ((needs_consent, 2), (begins_again, 0)):
        checks.check_exit(launch, code, ["SIGKILL worker 1"], ["full disk for 2.0 s"])
        for before in ([], ["SIGKILL worker 1"]):
            with pytest.raises(Broken, match="lost its checkpoints"):
                checks.check_exit(launch, code, ["SIGKILL worker 1"], before)
    # These are no words about a loss.
    checks.check_exit(ended("the run begins again from step 0"), 0, [])
    with pytest.raises(Broken, match="exit code 2"):
        checks.check_exit(ended("give --restarts 3"), 2, ["SIGKILL worker 1"])


def saved(updates: int, **more: Any) -> dict[str, Any]:
    return {"role": {"memory": {"updates": updates}}, **more}


def test_updates_of_servers_are_counted(tmp_path: Path) -> None:
    job = next(job for job in JOBS if job.counts_updates)
    assert checks.saved_updates(tmp_path, job) == {2: 0, 3: 0}
    Checkpoints(tmp_path, 2).write(SERVER_STATE_STEP, saved(40, store="2-a", num_received=2))
    assert checks.saved_updates(tmp_path, job) == {2: 40, 3: 0}
    # The checkpoint has all of this store.
    with closing(open_store(store_folder(tmp_path, 2, "a"))) as store:
        push(store, 2)
    # This one has a state, and two pushes since; its checkpoint is older.
    with closing(open_store(store_folder(tmp_path, 3, "b"))) as store:
        push(store, 5)
        store.save({"num_handed": 5, "state": saved(5)})
        push(store, 2)
        store.journal.append(journal.encode(Arrival(DONE, 0), HEADERS))
        store.journal.commit()
    assert checks.durable_updates(tmp_path, job) == {2: 40, 3: 7}
    assert checks.saved_updates(tmp_path, job) == {2: 40, 3: 0}
    with closing(open_store(store_folder(tmp_path, 2, "c"))) as store:
        push(store, 1)
    assert checks.durable_updates(tmp_path, job) == {2: 41, 3: 7}


def push(store: Store, count: int) -> None:
    for number in range(count):
        message = Framed(PushHeader(0, 0, 1, number, True), torch.zeros(4))
        store.journal.append(journal.encode(Arrival(ARRIVED, 0, message=message), HEADERS))
    store.journal.commit()


def test_what_a_failed_round_left_is_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        rounds,
        "Disk",
        lambda place: SimpleNamespace(can_fill=False, how="", close=lambda: shutil.rmtree(place)),
    )
    monkeypatch.setattr(rounds.Soak, "usual", lambda soak, job: rounds.Usual({}, None))
    monkeypatch.setattr(rounds.Soak, "_launch", lambda soak, job, place, *_: fails_in(place))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GRADWIRE_CACHE", "")  # `main` sets it, too
    monkeypatch.setattr(sys, "argv", ["run.py", "--round", "3", "--job", "asp"])
    with pytest.raises(SystemExit):
        rounds.main()
    said = capsys.readouterr().out
    assert "--seed 0 --round 3 --job asp" in said
    kept = Path(said.partition("its files: ")[2].splitlines()[0])
    assert (kept / "round-3" / "evidence").read_text() == "here"
    assert list(tmp_path.iterdir()) == [kept]


def fails_in(place: Path) -> None:
    place.mkdir()
    (place / "evidence").write_text("here")
    raise Broken("on purpose")


def test_the_keyless_job_has_no_keys() -> None:
    seen: list[Sequence[str]] = []

    def command(*words: Any) -> list[str]:
        return ["ps", words[0], "--keys", words[3], "--durable"]

    def launch(cast: Any, node: Any, *_: Any) -> None:
        seen.append(node("server", 1, "tcp://127.0.0.1:1", "/dev/fd/3", False))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyless, "launch_roles", launch)
        keyless.without_keys(Roles(NodeLayout(1, 1, 1), True, True), command)
    assert seen == [["ps", "server", "--durable"]]


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
