"""What is summed up of reports, by hand."""

from typing import Any

from gradwire.experiment.processes.measured import total_ledger
from gradwire.runtime.ledger import Ledger

WORKERS, SERVER, SCHEDULER, SIZE = 2, 2, 3, 4


def report(sent: list[tuple[int, int, int]], heard: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Messages as (source, destination, bytes)."""
    ledgers = Ledger(SIZE), Ledger(SIZE)
    for ledger, messages in zip(ledgers, (sent, heard)):
        for src, dst, nbytes in messages:
            ledger.record(src, dst, nbytes, "model")
    return {"ledger": ledgers[0].snapshot(), "received": ledgers[1].snapshot()}


def test_what_a_lost_worker_sent_is_what_servers_heard() -> None:
    """Worker 0 has a message under way; worker 1 came back and has counted its second life only."""
    heard = [(0, SERVER, 10)] * 3 + [(1, SERVER, 10)] * 5
    server = report([(SERVER, 0, 7)], heard) | {"pushes": {}}
    scheduler = report([(SCHEDULER, SERVER, 1)], [(0, SCHEDULER, 99)])  # no part of the training
    present = report([(0, SERVER, 10)] * 4, [])
    for second, missing in ((report([(1, SERVER, 10)] * 2, []), 30), (None, 50)):
        ledger = total_ledger([present, second, server, scheduler], WORKERS)
        assert ledger.link_bytes[0] == [0, 0, 40, 0]
        assert ledger.link_bytes[1] == [0, 0, 50, 0]
        assert ledger.link_messages[1] == [0, 0, 5, 0]
        assert ledger.tensor_bytes["of workers that were lost"] == missing
        assert sum(ledger.tensor_bytes.values()) == ledger.total_bytes == 40 + 50 + 7 + 1
