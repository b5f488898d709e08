"""Asynchronous runs of real processes, replayed from the order that they recorded."""

import signal
from pathlib import Path
from typing import Any

import pytest

from gradwire.runtime.replay.order import OrderError, load
from runtime.process import replay_cases
from runtime.process.launching import launch
from runtime.process.replay_cases import ASP, CASES, SIZE

Ran = tuple[Path, list[Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("orders")
    codes, results = launch(folder, SIZE, "runtime.process.replay_cases:run")
    assert codes == [0] * SIZE
    return folder, results


@pytest.mark.parametrize("job", range(len(CASES)), ids=[" | ".join(case) for case in CASES])
def test_the_replay_ends_in_the_same_bits_and_bytes(job: int, ran: Ran) -> None:
    folder, results = ran
    again = replay_cases.replayed(CASES[job], folder, job)
    assert again == [result[job] for result in results]


def test_another_order_is_another_run(ran: Ran) -> None:
    folder, results = ran
    job = len(CASES)
    case, _ = replay_cases.jobs()[job]
    assert case == ASP
    server = SIZE - 2
    first, second = (load(replay_cases.order_path(folder, one, server)) for one in (0, job))
    received = [
        [entry for entry in order.runs[0].entries if entry.kind == "received any"]
        for order in (first, second)
    ]
    assert received[0] != received[1]
    again = replay_cases.replayed(case, folder, job)
    assert again == [result[job] for result in results]
    assert again[server]["digests"]["params"] != results[server][0]["digests"]["params"]


@pytest.mark.slow
def test_a_worker_that_was_killed(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, SIZE, "runtime.process.replay_cases:killed", 30)
    assert codes == [0, -signal.SIGKILL, 0, 0, 0]
    with pytest.raises(OrderError, match="ends in the middle of a run"):
        load(replay_cases.order_path(tmp_path, 0, 1))
    again = replay_cases.replayed(ASP, tmp_path, 0, killed=frozenset({1}))
    for rank in (0, 2, 3, 4):
        assert again[rank] == results[rank]
