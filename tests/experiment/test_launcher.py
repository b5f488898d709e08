"""The launcher: the first cause is shown, once; it retries what may help; signals are passed on."""

import os
import signal
import sys
import threading
import time

import pytest

from gradwire.experiment.processes.launch import launcher
from gradwire.experiment.processes.launch.children import LOST, WRONG, Failure
from gradwire.experiment.processes.launch.launcher import launch

# Ranks that need not import anything slow.
REPORT = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def leave(kind, message, code):
    with open(os.environ["GRADWIRE_REPORT"], "w") as file:
        json.dump({"kind": kind, "message": message, "code": code}, file)
    sys.exit(code)
def meet():
    own = os.environ["GRADWIRE_REPORT"]
    mine = own.replace(".json", ".joined")
    open(mine, "w").close()
    names = [mine.replace(f"-{rank}.", f"-{other}.") for other in range(3)]
    while not all(map(os.path.exists, names)):
        time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(launcher, "_LEAVE_LIMIT_S", 1.0)


def ranks(script: str, size: int = 3, restarts: int = 0) -> tuple[Failure | None, list[str]]:
    said: list[str] = []
    command = [sys.executable, "-S", "-c", REPORT + script]
    return launch(size, lambda attempt: command, restarts, said.append), said


def test_all_is_well(capfd):
    assert ranks("print('rank', rank)") == (None, [])
    assert capfd.readouterr().out == "rank 0\n"  # others print where nobody looks


def test_the_cause_is_shown_not_its_consequences():
    failure, said = ranks(
        """
meet()
if rank == 1:
    leave("error", "NaN on rank 1", 2)
leave("lost", "rank 1 was lost", 3)
""",
        restarts=3,
    )
    assert failure == Failure("NaN on rank 1", WRONG, False)
    assert said == []  # it would only fail again


def test_a_rank_that_dies_without_a_word():
    failure, _ = ranks(
        """
meet()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    )
    assert failure is not None
    assert failure.code == LOST
    assert "rank 1 was killed by SIGKILL" in failure.message
    assert "rank 0 did not end and was killed" in failure.message


def test_a_death_before_all_have_met_ends_the_run_at_once(monkeypatch):
    monkeypatch.setattr(launcher, "_LEAVE_LIMIT_S", 600.0)
    script = """
if attempt == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        open(os.environ["GRADWIRE_REPORT"].replace(".json", ".joined"), "w").close()
    time.sleep(200)
"""
    began = time.monotonic()
    failure, _ = ranks(script)
    assert failure == Failure("rank 1 was killed by SIGKILL", LOST, True)
    failure, said = ranks(script, restarts=1)
    assert failure is None
    assert said == ["rank 1 was killed by SIGKILL\nstarting again (1 of 1)"]
    assert time.monotonic() - began < 120


def test_the_last_lines_of_a_rank_that_failed_without_a_report():
    failure, _ = ranks("if rank == 2: print('all is lost', file=sys.stderr); sys.exit(1)")
    assert failure is not None
    assert "rank 2 ended with exit code 1" in failure.message
    assert failure.message.endswith("all is lost")


def test_it_starts_them_again():
    failure, said = ranks("if rank == 1 and attempt < 2: leave('lost', 'gone', 3)", restarts=2)
    assert failure is None
    assert [text.splitlines()[-1] for text in said] == [
        "starting again (1 of 2)",
        "starting again (2 of 2)",
    ]
    failure, said = ranks("if rank == 1 and attempt < 2: leave('lost', 'gone', 3)", restarts=1)
    assert failure == Failure("gone", LOST, True)
    assert len(said) == 1


def test_a_signal_is_passed_on_and_nothing_starts_again():
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    failure, said = ranks(
        """
signal.signal(signal.SIGTERM, lambda *_: leave("signal", f"stopped in step {rank}", 143))
time.sleep(60)
""",
        restarts=2,
    )
    timer.join()
    assert failure == Failure("stopped in step 0", 143, False)
    assert said == []


def test_a_rank_that_stops_by_a_signal_stops_the_run():
    failure, _ = ranks("leave('signal', 'stopped by SIGTERM', 143)", restarts=2)
    assert failure == Failure("stopped by SIGTERM", 143, False)
