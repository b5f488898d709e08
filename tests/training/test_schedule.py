"""Schedules against values computed by hand."""

import math

import pytest

from gradwire.core.errors import NotationError
from gradwire.core.registry import Registry
from gradwire.training.schedule import Constant, Cosine, Schedule, Step

SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    Schedule,  # type: ignore[type-abstract]
    "gradwire.training.schedule",
)


def factors(schedule: Schedule, total_steps: int) -> list[float]:
    return [schedule.factor(step, total_steps) for step in range(total_steps)]


def test_constant() -> None:
    assert factors(Constant(), 3) == [1.0, 1.0, 1.0]
    assert factors(Constant(warmup=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_step() -> None:
    expected = [1.0, 1.0, 0.1, 0.1, 0.01]
    assert factors(Step((2, 4)), 5) == pytest.approx(expected)
    expected = [0.5, 1.0, 1.0, 0.5, 0.5]
    assert factors(Step((3,), gamma=0.5, warmup=2), 5) == pytest.approx(expected)


def test_step_at_fractions_of_the_run() -> None:
    expected = [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    assert factors(Step((0.5, 0.75)), 8) == pytest.approx(expected)
    assert factors(Step((0.5,)), 3) == pytest.approx([1.0, 1.0, 0.1])  # from step 1.5 on
    assert factors(Step((1, 0.5)), 4) == pytest.approx([1.0, 0.1, 0.01, 0.01])
    assert SCHEDULES.parse("step((0.5, 0.75))") == Step((0.5, 0.75))


def test_cosine() -> None:
    root = math.sqrt(0.5)
    expected = [1.0, (1 + root) / 2, 0.5, (1 - root) / 2]
    assert factors(Cosine(), 4) == pytest.approx(expected)
    expected = [0.5, 1.0, 1.0, 0.1 + 0.9 * (1 + root) / 2, 0.55, 0.1 + 0.9 * (1 - root) / 2]
    assert factors(Cosine(warmup=2, final=0.1), 6) == pytest.approx(expected)


def test_a_warmup_longer_than_the_run_only_warms_up() -> None:
    for schedule in (Constant(8), Step((9,), warmup=8), Cosine(8)):
        assert factors(schedule, 4) == [0.125, 0.25, 0.375, 0.5]


def test_notation_and_errors() -> None:
    assert SCHEDULES.names() == ["constant", "cosine", "step"]
    for schedule in (Constant(), Constant(5), Step((10, 20)), Step((5,), 0.5), Cosine(3, 0.1)):
        assert SCHEDULES.parse(repr(schedule)) == schedule
    for text, message in {
        "constant(-1)": "warmup >= 0 steps, got -1",
        "step((0,))": "whole numbers from 1",
        "step((1.5,))": "fractions of the run between 0 and 1",
        "step((5,), gamma=0.0)": "gamma > 0",
        "cosine(final=2)": "0 <= final <= 1",
    }.items():
        with pytest.raises(NotationError, match=message):
            SCHEDULES.parse(text)
    with pytest.raises(ValueError, match=r"step must lie in 0 .. 9, got 10"):
        Constant().factor(10, 10)
