import pytest

from gradwire.runtime.ledger import Ledger


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(3)
    ledger.record(0, 1, 100, "a")
    ledger.record(0, 1, 50, "b")
    ledger.record(2, 0, 7, "a")
    return ledger


def test_bytes_and_messages_are_counted_by_link_and_tensor(ledger) -> None:
    assert ledger.link_bytes == [[0, 150, 0], [0, 0, 0], [7, 0, 0]]
    assert ledger.link_messages == [[0, 2, 0], [0, 0, 0], [1, 0, 0]]
    assert ledger.tensor_bytes == {"a": 107, "b": 50}
    assert ledger.total_bytes == 157
    assert ledger.total_messages == 3
    assert [ledger.sent_by(rank) for rank in range(3)] == [150, 0, 7]
    assert [ledger.received_by(rank) for rank in range(3)] == [7, 150, 0]


def test_a_snapshot_is_a_copy_to_go_on_from(ledger) -> None:
    saved = ledger.snapshot()
    ledger.record(1, 2, 1000, "c")
    other = Ledger(3)
    other.restore(saved)
    assert other.total_bytes == 157
    other.record(1, 2, 1, "d")
    assert other.tensor_bytes["d"] == 1
    assert saved["link_bytes"][1][2] == 0
