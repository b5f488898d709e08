"""When checkpoints are due."""

from types import SimpleNamespace
from typing import Any

import pytest

from gradwire.experiment.processes.node import coordinator
from gradwire.experiment.processes.node.coordinator import Coordinator

REPORT = {"signal": 0, "segment_steps": 1, "step_s": 1.0}


class Clocked:
    """A coordinator with a clock of its own, in a run without evaluations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every_s: float) -> None:
        self.now_s, self.step = 100.0, 0
        monkeypatch.setattr(coordinator, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        experiment: Any = SimpleNamespace(
            plan=SimpleNamespace(num_steps=10**6),
            config=SimpleNamespace(eval_every=10**6, workers=1),
        )
        self.coordinator = Coordinator(experiment, None, every_s, None)

    def segments(self, count: int, save_s: float) -> list[int]:
        """Of so many segments of a second, those before which there is a checkpoint."""
        found = []
        for number in range(count):
            self.step += 1
            self.now_s += 1.0
            if self.coordinator.decide(self.step, [REPORT])["checkpoint"]:
                found.append(number)
                self.now_s += save_s
                self.coordinator.note_checkpoint(save_s)
        return found


def test_quick_checkpoints_come_as_often_as_they_should(monkeypatch):
    assert Clocked(monkeypatch, 5.0).segments(16, save_s=0.1) == [4, 9, 14]


def test_slow_checkpoints_leave_time_to_train(monkeypatch):
    clocked = Clocked(monkeypatch, 5.0)
    assert clocked.segments(130, save_s=6.0) == [4, 64, 124]
    # Ten times what the last one took, not the longest.
    assert clocked.segments(60, save_s=0.2) == [54, 59]


def test_a_signal_does_not_wait(monkeypatch):
    clocked = Clocked(monkeypatch, 5.0)
    clocked.segments(5, save_s=60.0)
    assert clocked.coordinator.decide(6, [REPORT | {"signal": 15}])["checkpoint"]
