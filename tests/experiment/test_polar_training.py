"""At half a bit per element, with feedback, training ends within half a point of uncompressed."""

import pytest

import gradwire
from gradwire.core.errors import DataError

HALF_A_BIT = (
    "ef(polar(0.5))",
    "ef(polar(0.5, rotate=True))",
    "ef(sign >> polar(0.5))",
    "ef(dq(0.5))",
)


def accuracies(method: str, **settings: object) -> tuple[float, float]:
    """At the end of training, and bits per element and message."""
    run = gradwire.simulate(compression=method, workers=4, threads=1, **settings)
    summary = run.summary
    messages = 4 * 3 * summary["config"]["steps"]  # each of four workers tells three
    bits = 8 * summary["bytes_sent"] / messages / run.params.numel()
    return summary["test_accuracy"], bits


@pytest.fixture(scope="module")
def digits() -> float:
    return accuracies("identity", data="digits", model="mlp", steps=400, eval_every=400)[0]


@pytest.mark.parametrize("method", ["ef(polar(0.5))", "ef(dq(0.5))"])
def test_digits(method, digits) -> None:
    accuracy, bits = accuracies(method, data="digits", model="mlp", steps=400, eval_every=400)
    assert bits < 0.52  # headers of three messages of 17,226 elements
    assert accuracy > digits - 0.005 - 1 / 360  # half a point, of 360 images at least one more


@pytest.mark.slow
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
