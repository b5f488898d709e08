"""What docs/scheduling.md says is what was measured, and can be measured again."""

import importlib.util
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def study(monkeypatch):
    """By its path: tests have a folder of the same name."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    spec = importlib.util.spec_from_file_location(
        "scheduling_study", ROOT / "experiments" / "scheduling.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(study):
    return json.loads(study.KEPT.read_text())


def test_every_cell_was_measured(study, results) -> None:
    found = {(r["model"], r["network"], r["codec"]) for r in results["schedules"]}
    models = [model for model, *_ in study.MODELS]
    assert found == set(product(models, study.NETWORKS, study.CODECS))
    num_schedules = len(study.SAME_EVERYWHERE) + len(study.OWN_ON_EACH)
    assert len(results["schedules"]) == len(found) * num_schedules
    pairs = [(row["topology"], row["architecture"]) for row in results["topologies"]]
    assert pairs == list(product(study.TOPOLOGIES, study.ARCHITECTURES))


def test_the_page_shows_what_was_measured(study, results) -> None:
    page = study.PAGE.read_text()
    for model, *_ in study.MODELS:
        assert study.schedule_table(results["schedules"], model) in page
    assert study.verdict_table(results["schedules"]) in page
    assert study.topology_table(results["topologies"]) in page
    assert study.against_table(results["schedules"]) in page


@pytest.mark.parametrize("schedule", ["mgwfbp", "priority"])
def test_schedules_that_decide_by_prices_are_within_3_percent_of_wfbp(
    study, results, schedule
) -> None:
    for model, *_ in study.MODELS:
        ratios = study.against_wfbp(results["schedules"], model, schedule)
        assert len(ratios) == len(study.NETWORKS) * len(study.CODECS)
        assert max(ratio for ratio, *_ in ratios) < 1.03
        assert min(ratio for ratio, *_ in ratios) < 0.92


def test_gradients_are_drawn_and_times_are_those_of_their_sizes(study) -> None:
    """On digits, since other data sets may be missing: two messages of 4 d / 8 bytes each way."""
    config = replace(
        study.BASE,
        model="mlp((32,))",
        compute="fixed(0.5)",
        coding="free",
        bandwidth="1Mbit",
        latency="0s",
        what_if=(study.FASTEST,),
    )
    times = study.seconds_per_step(config)
    nbytes = 4 * (64 * 32 + 32 + 32 * 10 + 10)
    assert times[study.FASTEST] == pytest.approx(0.5, rel=1e-6)
    assert times["1Mbit"] == pytest.approx(0.5 + 2 * 7 / 8 * nbytes * 8e-6, rel=0.01)
