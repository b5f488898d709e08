"""Simulator and real processes give the same bits, and the same bytes in the ledger."""

from pathlib import Path

import pytest

from runtime.process.launching import launch
from runtime.process.parity_cases import cases


@pytest.mark.parametrize("size", [2, 3, 4])
def test_same_trajectory_as_the_simulator(size: int, tmp_path: Path) -> None:
    codes, results = launch(tmp_path, size, "runtime.process.parity_cases:run")
    assert codes == [0] * size
    for verdicts in results:
        assert len(verdicts) == len(cases(size))
        assert {case: what for case, what in verdicts.items() if what} == {}
