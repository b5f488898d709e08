"""Simulator and real processes give the same bits, and the same bytes in the ledger."""

import os
from pathlib import Path

import pytest

from runtime.process import parity_cases
from runtime.process.launching import launch
from sampling import slow


def check(num_workers: int, folder: Path, seconds: float) -> None:
    size = num_workers + parity_cases.MOST_OTHERS
    codes, results = launch(folder, size, "runtime.process.parity_cases:run", seconds)
    assert codes == [0] * size
    verdicts, refused = results[0]["verdicts"], results[0]["refused"]
    for result in results:
        assert {case: what for case, what in result["verdicts"].items() if what} == {}
    asynchronous = [case for case, why in refused.items() if why == parity_cases.ASYNCHRONOUS]
    print(
        f"{num_workers} workers: {len(verdicts)} cases agree, {len(asynchronous)} depend on time, "
        f"{len(refused) - len(asynchronous)} are refused"
    )
    assert len(verdicts) > 40
    # Nothing but what servers or neighbours do one at a time depends on time.
    assert all("server" in case or "gossip" in case for case in asynchronous)


@pytest.mark.parametrize("num_workers", [slow(2), 3, slow(4)])
def test_same_trajectory_as_the_simulator(num_workers: int, tmp_path: Path) -> None:
    check(num_workers, tmp_path, 120)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_all_combinations(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every combination once: each number of workers has a part of them.

    With GRADWIRE_PARITY_SHARE=all in the environment each has all of them.
    """
    if parity_cases.SHARE not in os.environ:
        monkeypatch.setenv(parity_cases.SHARE, "part")
    check(num_workers, tmp_path, 1800)
