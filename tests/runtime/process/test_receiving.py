"""Receiving and decoding overlap: what comes while a program is in a call is taken in."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gradwire.runtime.process.expected import MAX_NBYTES, ExpectedLength
from runtime.process.launching import launch


def test_messages_are_received_while_a_program_is_busy(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 3, "runtime.process.receiving_cases:run", 60)
    assert codes == [0, 0, 0]
    assert results[0]["gloo"] >= 2  # the third says that rank 1 is done
    assert results[0]["zeromq"] >= 2


def test_payloads_of_all_lengths(tmp_path: Path) -> None:
    codes, results = launch(tmp_path, 2, "runtime.process.receiving_cases:lengths", 60)
    assert codes == [0, 0]
    assert results == [2, 2]  # expected were 1 MiB, then 2


@given(st.lists(st.integers(1, 2 * MAX_NBYTES)))
def test_a_posted_receive_has_room_and_there_are_few(lengths: list[int]) -> None:
    expected, posted = ExpectedLength(), {}
    for nbytes in lengths:
        tag = expected.next_tag(nbytes)
        assert not tag or posted[tag] >= nbytes
        posted[expected.tag] = expected.nbytes
    assert expected.nbytes <= MAX_NBYTES
    assert expected.tag <= MAX_NBYTES.bit_length()
