"""What a server remembers of what it sent."""

from collections import Counter

import pytest
import torch

from gradwire.runtime.durable import resend_queue
from gradwire.runtime.durable.resend_queue import ResendQueue
from gradwire.runtime.process.frames import Headers

MODEL = torch.zeros(1000)


class Receivers:
    """Those of a resend queue; `missing` is how many of the last messages each has not got."""

    def __init__(self) -> None:
        self.missing: Counter[int] = Counter()
        self.num_asked = 0
        self.queue = ResendQueue(Headers(), self._outstanding)

    def _outstanding(self) -> dict[int, int]:
        self.num_asked += 1
        return dict(self.missing)

    def send(self, count: int, dst: int = 0) -> int:
        """So many models; the most that were remembered at a time."""
        most = 0
        for _ in range(count):
            self.queue.add(dst, 0, 7, MODEL)
            most = max(most, self.queue.num_to(dst))
        return most


@pytest.fixture
def receivers(monkeypatch) -> Receivers:
    monkeypatch.setattr(resend_queue, "_MIN_NBYTES", 4 * MODEL.nbytes)
    return Receivers()


def test_few_large_messages_are_remembered(receivers):
    assert receivers.send(100) < 4
    assert receivers.num_asked == 25


def test_those_that_were_not_received_stay_and_are_not_asked_for_each_time(receivers):
    receivers.missing[0] = 10**6
    assert receivers.send(64) == 64
    assert receivers.num_asked < 10
    receivers.missing[0] = 5
    receivers.queue.forget_received()
    assert receivers.queue.num_to(0) == 5
    receivers.num_asked = 0
    assert receivers.send(100) <= 10
    assert receivers.num_asked == 20


def test_bytes_for_who_is_gone_do_not_count(receivers):
    receivers.missing.update({0: 3, 1: 10**6})
    receivers.send(100, dst=1)
    receivers.queue.drop(1)
    assert receivers.queue.num_to(1) == 0
    receivers.queue.forget_received()
    assert receivers.send(100) <= 6


def test_small_messages_are_counted():
    receivers = Receivers()
    assert receivers.send(320) < 32
    assert receivers.num_asked == 10
