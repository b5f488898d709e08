"""Real processes: messages of all kinds, and peers that leave, send rubbish or are killed."""

import signal
from pathlib import Path

import pytest

from runtime.process.launching import launch


def test_kill_in_the_middle_of_an_all_reduce(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 3, "runtime.process.fault_cases:killed", 30)
    assert codes == [0, -signal.SIGKILL, 0]
    for result in (results[0], results[2]):
        assert result["lost"] == 1
        assert result["members"] == [0, 2]
        assert result["raises"]
        assert any("in the program of rank" in note for note in result["notes"])
        assert result["unread_by"] == []  # the thread that received from it has ended
        assert result["noticed_s"] < 15


def test_messages_and_peers_that_fail(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 4, "runtime.process.fault_cases:messages", 40)
    assert codes == [0] * 4
    lengths = [0, 1, 1_000, 40_000, 0, 90_000]
    for rank, seen in enumerate(results):
        assert seen["kinds"] == "as sent"
        nbytes = sum(4 * (length + rank) for length in lengths) + 4
        assert seen["ledger"] == [0 if dst == rank else nbytes for dst in range(4)]
    for seen in results[:3]:
        assert seen["left"][0] == "PeerLost"
        assert "rank 3: it said goodbye" in seen["left"]
    for seen in results[:2]:
        assert seen["rubbish"][0] == "PeerLost"
        assert any("no frame of version 1" in note for note in seen["rubbish"])
    kind, text, *_ = results[0]["silent"]
    assert kind == "StuckError"
    assert "nothing has happened for 0.3 s" in text
    assert "rank 0 waits for a message from rank 1, tag 'never'" in text


@pytest.mark.slow
def test_no_process_outlives_its_time(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 2, "runtime.process.launching:hang", 3)
    assert codes == [-signal.SIGKILL] * 2
    assert results == [None, None]
