"""NaN that only the mean shows is found in the gradient of the worker that sent it."""

import pytest
import torch

import gradwire
from gradwire.core.errors import NonFiniteError
from gradwire.core.rows import Rows
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from gradwire.training.task import Task

SETTINGS = {
    "workers": 4,
    "steps": 3,
    "model": "mlp((16,))",
    "batch_size": 8,
    "eval_every": 3,
    "compute": "fixed(0.01)",
}


@pytest.fixture
def looks(monkeypatch) -> list[int]:
    """How many rows were looked into, each time."""
    found: list[int] = []
    is_finite = Rows.is_finite

    def look(rows: Rows, number: int) -> bool:
        if not rows.is_trusted and rows._finite is None:
            found.append(len(rows.whole))
        return is_finite(rows, number)

    monkeypatch.setattr(Rows, "is_finite", look)
    return found


def spoil(monkeypatch, spoilt: dict[int, float], step: int, position: int = -1) -> None:
    """Gradients of these ranks get a value in one step."""
    gradients = Task.gradients

    def spoiling(task, requests):
        results = gradients(task, requests)
        for rank, value in spoilt.items():
            if requests[rank].key.step == step:
                results[rank].gradient[position] = value
        return results

    monkeypatch.setattr(Task, "gradients", spoiling)


@pytest.mark.parametrize("scheduling", ["sequential", 'sequential("layer")'])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_error_is_that_of_the_worker_that_sent_it(monkeypatch, value, scheduling) -> None:
    spoil(monkeypatch, {2: value}, step=1)
    with pytest.raises(
        NonFiniteError, match=f"{value} in the gradient of .*bias on rank 2 in step 1"
    ):
        gradwire.simulate(**SETTINGS, scheduling=scheduling)


def test_infinities_that_cancel_are_found(monkeypatch) -> None:
    spoil(monkeypatch, {1: float("inf"), 3: -float("inf")}, step=2)
    with pytest.raises(NonFiniteError, match=r"inf in the gradient of .* on rank [13] in step 2"):
        gradwire.simulate(**SETTINGS)


def test_finite_gradients_whose_sum_is_too_large_are_nobodys(monkeypatch) -> None:
    spoil(monkeypatch, {0: 3e38, 3: 3e38}, step=0)
    with pytest.raises(NonFiniteError, match="another rank sent it, or the sum is too large"):
        gradwire.simulate(**SETTINGS)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 0),  # the mean shows it
        ({"scheduling": 'sequential("layer")'}, 0),
        ({"compression": "randomk(0.5)"}, 3),  # which leaves out some elements
        ({"nonfinite": "skip"}, 3),
        ({"clip_norm": 1.0, "synchronization": "localsgd(2)"}, 3),
    ],
)
def test_gradients_are_looked_into_where_the_mean_does_not_show_it(looks, settings, expected):
    gradwire.simulate(**SETTINGS, **settings)
    assert len([count for count in looks if count == SETTINGS["workers"]]) == expected


def test_only_codecs_that_add_what_they_get_show_all() -> None:
    shows = {
        text: prepare(Config(**SETTINGS, compression=text)).plan.mean_shows_all
        for text in (
            "identity",
            "fp16",
            "topk(0.1)",
            "randomk(0.1)",
            "ef(identity)",
            "qsgd(bits=4)",
        )
    }
    assert shows.pop("identity")
    assert not any(shows.values())


def test_rows_that_are_trusted_are_not_looked_into(looks) -> None:
    rows = Rows(torch.full((2, 3), float("nan")))
    rows.is_trusted = True
    assert rows.is_finite(1)
    rows.is_trusted = False
    assert not rows.is_finite(1)
    assert looks == [2]
