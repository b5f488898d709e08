"""What the table of a run says about times: what they are made of, and what they are divided by."""

import io

import pytest
from rich.console import Console

import gradwire
from gradwire.cli.compare import _title
from gradwire.cli.run import _rates, _run_table, _shares
from gradwire.experiment.costs.coding_costs import read_costs
from gradwire.experiment.studies.compare import Outcome

QUICK = {"steps": 2, "batch_size": 4, "model": "mlp((16,))", "compute": "fixed(0.001)"}


def shown(run: gradwire.Run) -> dict[str, str]:
    out = io.StringIO()
    Console(file=out, width=400).print(_run_table(run.config, run.summary))
    lines = [line.strip().partition("  ") for line in out.getvalue().splitlines() if line.strip()]
    return {name: value.strip() for name, _, value in lines}


def test_the_tables_say_how_coding_is_charged() -> None:
    hardware = read_costs("").hardware
    run = gradwire.simulate(**QUICK)
    assert shown(run)["coding time"] == f"modelled, {hardware}, one thread"
    assert f"Coding time: modelled, {hardware}" in _title([Outcome("x", run.config, run)])
    slow = gradwire.simulate(**QUICK, coding_slowdown=2.5)
    assert shown(slow)["coding time"].endswith("one thread, 2.5 times as long")
    assert shown(gradwire.simulate(**QUICK, coding="free"))["coding time"].startswith("free")
    measured = gradwire.simulate(**QUICK, coding="measured")
    assert shown(measured)["coding time"] == "measured here and now"


def test_the_spread_of_a_measured_gradient_is_shown() -> None:
    run = gradwire.simulate(**QUICK)
    assert shown(run)["compute time"] == "fixed(0.001) per gradient"
    found = {"seconds": 0.001, "median_s": 0.0012, "repeats": 60, "threads": 1}
    run.summary["compute_measured"] = found
    assert shown(run)["compute time"] == (
        "fixed(0.001) per gradient, measured on 1 thread: fastest of 60, the middle one took 20% "
        "longer"
    )


@pytest.mark.parametrize(
    ("in_step", "text"),
    [
        (True, "12 s, 120 ms per step of all workers"),
        (False, "12 s on the slowest node, 33.3 gradients per second of all workers together"),
    ],
)
def test_times_of_real_runs_say_what_they_are_divided_by(in_step, text) -> None:
    summary = {"training_time_s": 12.0, "step_time_s": 0.12, "gradients": 400, "in_step": in_step}
    assert _rates(summary) == {"time of training": text}


@pytest.mark.parametrize(
    ("in_step", "name", "text"),
    [
        (
            True,
            "of a step",
            "100 ms: gradients 40 ms, coding and updates 10 ms, waiting 30 ms, sending and the "
            "rest 20 ms (mean of the workers)",
        ),
        (
            False,
            "of a gradient",
            "200 ms: gradients 80 ms, coding and updates 20 ms, waiting 60 ms, sending and the "
            "rest 40 ms (mean of the workers)",
        ),
    ],
)
def test_parts_of_a_step_add_up(in_step, name, text) -> None:
    summary = {
        "in_step": in_step,
        "steps": 100,
        "steps_timed": 50.0,  # gradients of a worker
        "worker_time_s": 10.0,
        "compute_time_s": 4.0,
        "call_time_s": {"encode": 0.75, "update": 0.25},
        "wait_time_s": 3.0,
    }
    assert _shares(summary) == {name: text}
    del summary["worker_time_s"]  # as in records of older versions
    assert "rest" not in _shares(summary)[name]
