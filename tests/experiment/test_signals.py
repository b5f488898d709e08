"""Signals to a process that is not ready for them yet."""

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from gradwire.experiment.processes.launch.launcher import launch
from gradwire.experiment.processes.launch.signals import Interrupted, Signals, held

# A rank that takes its time to import, and is told to stop meanwhile. It does not import gradwire,
# which takes long; what `Signals.caught` does is written out.
SLOW = """
import json, os, signal, sys, time
time.sleep(1.0)
def told(number, frame):
    with open(os.environ["GRADWIRE_REPORT"], "w") as file:
        json.dump({"kind": "signal", "message": "stopped in time", "code": 128 + number}, file)
    os._exit(128 + number)
signal.signal(signal.SIGINT, told)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _not_ignored() -> Iterator[None]:
    """As in a terminal; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_came_while_it_was_held_is_told_when_it_is_caught() -> None:
    with held():
        signal.raise_signal(signal.SIGINT)  # to this thread
        with pytest.raises(Interrupted, match="stopped by SIGINT"), Signals().caught():
            pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_raised_where_nobody_hears_it_is_told_later() -> None:
    class Deleted:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with Signals().caught() as signals:
        Deleted()
        assert signals.wanted == signal.SIGTERM


def test_ctrl_c_while_ranks_import_is_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()
    failure = launch(2, lambda attempt: [sys.executable, "-S", "-c", SLOW])
    assert failure == ("stopped in time", 130, False)
    assert capfd.readouterr() == ("", "")
