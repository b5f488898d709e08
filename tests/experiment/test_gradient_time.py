"""The time of a gradient: what other work takes does not count, and a spread is told."""

import time
import warnings

import pytest
import torch

import gradwire
from gradwire.core.errors import GradwireWarning
from gradwire.experiment.costs.gradient_time import default_threads, measure_gradient

CPU = torch.device("cpu")


def measured(seconds: list[float]):
    """With a clock by which evaluations take these times, again and again."""
    now, count = 0.0, 0

    def evaluate() -> None:
        nonlocal now, count
        now, count = now + seconds[count % len(seconds)], count + 1

    return measure_gradient(evaluate, CPU, 1, clock=lambda: now)


def test_a_disturbed_evaluation_does_not_count() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = measured([0.0005, 0.0006, 0.144])
    assert found.seconds == pytest.approx(0.0005)
    assert found.spread == pytest.approx(1.2)
    assert found.repeats >= 7


def test_a_large_spread_is_told() -> None:
    with pytest.warns(GradwireWarning, match=r"varies.*fixed\(0.0005\)"):
        found = measured([0.0005, 0.144, 0.144])
    assert found.seconds == pytest.approx(0.0005)


def test_time_in_which_the_thread_does_not_run_does_not_count() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measure_gradient(lambda: time.sleep(0.05), CPU, 1)
    assert found.seconds < 0.025


def test_torch_has_its_threads_back() -> None:
    before = torch.get_num_threads()
    used = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measure_gradient(lambda: used.append(torch.get_num_threads()), CPU, 1)
    assert set(used) == {1}
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_small_networks_take_one_thread_unless_told() -> None:
    assert (default_threads(17_226), default_threads(10**7)) == (1, 0)
    quick = {"steps": 2, "batch_size": 4, "compute": "fixed(0.001)"}
    small = gradwire.simulate(**quick, model="mlp((16,))")
    assert (small.config.threads, small.summary["threads"]) == (1, 1)
    told = gradwire.simulate(**quick, model="mlp((16,))", threads=2)
    assert (told.config.threads, told.summary["threads"]) == (2, 2)
    large = gradwire.simulate(**quick, model="mlp((512, 512))", workers=2)
    assert large.config.threads == 0
    assert large.summary["threads"] == torch.get_num_threads()


def test_the_record_has_what_was_measured() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = gradwire.simulate(steps=2, batch_size=4, model="mlp((16,))")
    found = run.summary["compute_measured"]
    assert found["threads"] == 1
    assert 0 < found["seconds"] <= 1.001 * found["median_s"]
    assert run.config.compute == f"fixed({found['seconds']!r})"
    given = gradwire.simulate(steps=2, batch_size=4, model="mlp((16,))", compute="fixed(0.001)")
    assert given.summary["compute_measured"] is None
