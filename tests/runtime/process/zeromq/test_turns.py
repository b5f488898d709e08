"""Turns that end in the middle, as when a signal's handler raises."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from gradwire.runtime.zeromq.turns import Turns


class _Told(Exception):
    pass


def _tell(number: int, _: FrameType | None) -> None:
    raise _Told


@pytest.fixture
def _alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _tell)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _take_turns(turns: Turns, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        with turns:
            pass


@pytest.mark.usefixtures("_alarm")
def test_a_caller_who_is_interrupted_anywhere_gets_another_turn() -> None:
    waits = threading.Event()
    turns = Turns(lambda timeout_s: bool(waits.wait(0.0001)), "stand-in")
    turns.start()
    for number in range(400):
        with pytest.raises(_Told):
            _take_turns(turns, 0.0005 + 0.000001 * number)
        signal.setitimer(signal.ITIMER_REAL, 10)
        with turns:  # or told after 10 s
            signal.setitimer(signal.ITIMER_REAL, 0)
    turns.stop()  # nor does its thread wait
