"""At half a bit per element, with feedback, training ends within half a point of uncompressed."""

import pytest

import gradwire
from gradwire.core.errors import DataError

HALF_A_BIT = (  # or less
    "ef(polar(0.5))",
    "ef(polar(0.5, rotate=True))",
    "ef(sign >> polar(0.5))",
    "ef(topk(0.05) >> polar(1.0))",
    "ef(dq(0.5))",
)


def accuracies(method: str, **settings: object) -> tuple[float, float]:
    """At the end of training, and bits per element and message."""
    run = gradwire.simulate(compression=method, workers=4, threads=1, **settings)
    summary = run.summary
    messages = 4 * 3 * summary["config"]["steps"]  # each of four workers tells three
    bits = 8 * summary["bytes_sent"] / messages / run.params.numel()
    return summary["test_accuracy"], bits


def digits(method: str, steps: int) -> tuple[float, float]:
    return accuracies(method, data="digits", model="mlp", steps=steps, eval_every=steps)


@pytest.mark.slow
def test_digits() -> None:
    accuracy, bits = digits("ef(polar(0.5))", 400)
    assert bits < 0.52  # headers of messages of 17,226 elements
    # Half a point, of 360 images at least one more.
    assert accuracy > digits("identity", 400)[0] - 0.005 - 1 / 360


@pytest.mark.slow
def test_dq_trains() -> None:
    # It takes tens of milliseconds to choose among codes of so short a vector: few steps here.
    accuracy, bits = digits("ef(dq(0.5))", 100)
    assert bits < 0.5
    assert accuracy > digits("identity", 100)[0] - 0.02


@pytest.mark.long
@pytest.mark.parametrize("method", HALF_A_BIT)
def test_digits_with_all_of_them(method) -> None:
    assert digits(method, 400)[0] > digits("identity", 400)[0] - 0.005 - 1 / 360


@pytest.mark.long
@pytest.mark.parametrize("method", HALF_A_BIT)
def test_mnist(method) -> None:
    settings = {
        "data": "mnist",
        "model": "mnist_cnn",
        "optimizer": "sgd(0.05)",
        "batch_size": 32,
        "steps": 800,
        "eval_every": 800,
    }
    try:
        plain, _ = accuracies("identity", **settings)
    except DataError as error:
        pytest.skip(str(error))
    accuracy, _ = accuracies(method, **settings)
    assert accuracy > plain - 0.005
