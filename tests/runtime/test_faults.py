"""Faults as they are written, and those that cannot happen."""

import pytest

from gradwire.core.errors import NotationError
from gradwire.runtime.network.faults import FAULTS, Arrive, Crash, Loss, parse_faults
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine


def test_every_example_reads_back_from_what_it_writes() -> None:
    assert FAULTS.builtin_names() == ["arrive", "crash", "loss"]
    for cls in FAULTS:
        assert cls.examples
        for text in cls.examples:
            assert FAULTS.parse(repr(FAULTS.parse(text))) == FAULTS.parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("crash(0, at=-1.0)", "at must be a finite number of seconds >= 0"),
        ("crash(0, at=1e999)", "finite"),
        ("crash(0, at=2.0, rejoin=1.0)", "rejoin 1.0 must come after the crash at 2.0"),
        ("crash(0, at=2.0, rejoin=2.0)", "must come after"),
        ("crash(0, at=2.0, rejoin=1e999)", "finite"),
        ("crash(0)", "needs at"),
        ("arrive(0, at=-1.0)", ">= 0"),
        ("loss(1.0)", "at least 0 and below 1, got 1.0"),
        ("loss(-0.1)", "at least 0"),
        ("loss(0.1, timeout=-1.0)", ">= 0"),
        ("fire(0)", "Valid names: arrive, crash, loss"),
    ],
)
def test_faults_that_make_no_sense_are_refused(text, why) -> None:
    with pytest.raises(NotationError, match=why):
        FAULTS.parse(text)


def test_faults_may_be_strings_or_values() -> None:
    expected = (Crash(1, 2.0, rejoin=3.0), Arrive(0, 1.0), Loss(0.1))
    assert parse_faults(["crash(1, at=2.0, rejoin=3.0)", Arrive(0, 1.0), "loss(0.1)"], 4) == (
        expected
    )
    assert parse_faults([], 4) == ()


@pytest.mark.parametrize(
    "faults",
    [
        ["crash(1, at=1.0, rejoin=2.0)", "crash(1, at=3.0, rejoin=4.0)", "crash(1, at=5.0)"],
        ["crash(1, at=5.0)", "crash(1, at=1.0, rejoin=2.0)"],
        ["arrive(1, at=1.0)", "crash(1, at=2.0)"],
        ["crash(0, at=1.0)", "crash(1, at=1.0)", "crash(2, at=1.0)"],
    ],
)
def test_one_worker_may_have_a_long_history(faults) -> None:
    assert len(parse_faults(faults, 3)) == len(faults)


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        (["crash(3, at=1.0)"], r"there is no worker 3; workers are 0 \.\. 2"),
        (["arrive(-1, at=1.0)"], "there is no worker -1"),
        (["loss(0.1)", "loss(0.2)"], "give one loss"),
        (["crash(1, at=1.0)", "crash(1, at=2.0)"], "worker 1 is not there at 2 s"),
        (["crash(1, at=1.0)", "crash(1, at=1.0)"], "worker 1 is not there at 1 s"),
        (["crash(1, at=1.0, rejoin=3.0)", "crash(1, at=2.0)"], "worker 1 is not there at 2 s"),
        (["crash(1, at=1.0, rejoin=2.0)", "crash(1, at=2.0)"], "worker 1 is not there at 2 s"),
        (["arrive(1, at=2.0)", "crash(1, at=1.0)"], "a worker arrives once"),
        (["arrive(1, at=2.0)", "crash(1, at=2.0)"], "worker 1 is not there at 2 s"),
        (["arrive(1, at=1.0)", "arrive(1, at=2.0)"], "a worker arrives once"),
        (["arrive(0, at=1.0)", "arrive(1, at=1.0)", "arrive(2, at=1.0)"], "from the start"),
    ],
)
def test_faults_that_contradict_each_other_are_refused(faults, why) -> None:
    with pytest.raises(ValueError, match=why):
        parse_faults(faults, 3)


def test_only_workers_crash() -> None:
    with pytest.raises(ValueError, match=r"no worker 2; workers are 0 \.\. 1"):
        VirtualEngine(Network.uniform(3), 2, faults=["crash(2, at=1.0)"])


@pytest.mark.parametrize("heartbeat_s", [-1.0, float("inf"), float("nan")])
def test_a_heartbeat_takes_some_time(heartbeat_s) -> None:
    with pytest.raises(ValueError, match="heartbeat_s must be a finite number"):
        VirtualEngine(Network.uniform(3), heartbeat_s=heartbeat_s)
