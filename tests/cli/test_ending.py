"""A process that was told to end does so, whatever it waits for."""

import subprocess
import sys

STUCK = """
import signal, threading
from gradwire.cli import ending

ending._END_LIMIT_S = 0.5
lock = threading.Lock()

def work(signals):
    lock.acquire()
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        lock.acquire()  # never

ending.end_with(work)
"""


def test_one_that_waits_for_nothing_is_ended_and_says_where_it_was() -> None:
    command = [sys.executable, "-c", STUCK]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in work" in ended.stderr
