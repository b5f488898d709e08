"""Native collectives, limits of what is unread, and payloads that go apart from their frames."""

import signal
from pathlib import Path

import pytest

from runtime.process.launching import launch
from runtime.process.native_cases import NUM_EARLY, SIZES


def test_native_means_and_limits(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 3, "runtime.process.native_cases:natively")
    assert codes == [0] * 3
    for seen in results:
        assert seen["num_native False"] == 0
        # Two architectures and two dtypes; one more at the end. Not 16-bit floats, not pairs.
        assert seen["num_native True"] == 4 * len(SIZES) + 1
        assert seen["counted alike"]
        assert all(seen["close"])
        assert seen["halves"] == [True] * 4 * len(SIZES)
        assert seen["side by side"]
        # 5 of each of 3 programs, in turn, and the last; none while programs are unjoined.
        assert seen["num_native of those"] == 16
        # Each sends and receives, and has the same number on all ranks.
        assert seen["collectives drawn"] == results[0]["collectives drawn"]
        assert len(seen["collectives drawn"]) == 2 * 16
        assert seen["arrived before"]
        identity, halves, lowrank = seen["trained"]
        assert identity < 1e-6
        assert halves == 0
        assert lowrank < 1e-5  # it divides by norms
        assert seen["both send"]
        assert seen["apart"]
        assert seen["copied before"] == [True, 4]  # of six messages to two peers each
    unread = results[0]["unread"]
    # A limit of 3 MB, and the message that went beyond it.
    assert 0 < unread["most"] <= 4 << 20
    assert 0 < unread["in inbox"] <= NUM_EARLY << 20
    assert unread["in inbox, at last"] == 0


@pytest.mark.slow
def test_kill_in_the_middle_of_native_means(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 3, "runtime.process.native_cases:killed", 30)
    assert codes == [0, -signal.SIGKILL, 0]
    for result in (results[0], results[2]):
        assert result["lost"] == 1
        assert result["took_s"] < 15
