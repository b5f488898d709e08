"""Receiving and decoding overlap: what comes while a program is in a call is taken in."""

from pathlib import Path

from runtime.process.launching import launch


def test_messages_are_received_while_a_program_is_busy(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 3, "runtime.process.receiving_cases:run", 60)
    assert codes == [0, 0, 0]
    assert results[0]["gloo"] >= 2  # the third says that rank 1 is done
    assert results[0]["zeromq"] >= 2
