"""Under gossip every worker has a model: accuracy is the mean over them, with least and most."""

import json

import pytest

import gradwire
from gradwire.cli import main
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare

COMMON = {
    "steps": 12,
    "batch_size": 8,
    "workers": 3,
    "compute": "fixed(0.001)",
    "threads": 1,
    "evaluation": "sequential",
}


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "gossip(ring)"},
        {"architecture": "gossip(ring)", "synchronization": "localsgd(4)"},
        {"architecture": "gossip(ring, adpsgd)", "synchronization": "asp"},
    ],
)
def test_accuracy_is_the_mean_over_the_workers(settings):
    run = gradwire.simulate(**COMMON, **settings)
    experiment = prepare(run.config)
    agreed = experiment.plan.synchronization.agreed
    tests = [
        experiment.plan.task.evaluate(agreed(one), one.buffers, experiment.test_batches())
        for one in run.replicas
    ]
    accuracies = [test.accuracy for test in tests]
    assert len(set(accuracies)) > 1  # or this would show nothing
    assert run.accuracy == pytest.approx(sum(accuracies) / 3, abs=1e-12)
    assert run.summary["test_accuracy_min"] == min(accuracies)
    assert run.summary["test_accuracy_max"] == max(accuracies)
    assert run.summary["test_loss"] == pytest.approx(sum(test.loss for test in tests) / 3)
    for row in run.metrics:
        assert row["test_accuracy_min"] <= row["test_accuracy"] <= row["test_accuracy_max"]


def test_models_that_all_agree_on_are_evaluated_once(monkeypatch):
    evaluated = []
    experiment = prepare(Config(**COMMON))
    original = type(experiment.plan.task).evaluate

    def evaluate(task, params, *others):
        evaluated.append(params)
        return original(task, params, *others)

    monkeypatch.setattr(type(experiment.plan.task), "evaluate", evaluate)
    run = gradwire.simulate(**COMMON)
    assert len(evaluated) == len(run.metrics)
    assert "test_accuracy_min" not in run.summary


def test_tables_label_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in COMMON.items()]
    main(["run", *flags, "--architecture", "gossip(ring)", "--out", "a"])
    words = "the mean over the workers' own models, which have"
    assert words in " ".join(capsys.readouterr().out.split())
    main(["compare", *flags, "--architecture", "gossip(ring)", "--out", "b"])
    printed = " ".join(capsys.readouterr().out.split())
    assert f"gossip(ring): the accuracy is {words}" in printed
    row = json.loads((tmp_path / "b" / "table.json").read_text())[0]
    assert row["test_accuracy_min"] < row["test_accuracy"] < row["test_accuracy_max"]


@pytest.mark.slow
def test_real_processes_have_the_same_rows(tmp_path, monkeypatch):
    """The rank that keeps the record evaluates the models of all."""
    monkeypatch.chdir(tmp_path)
    common = {name: value for name, value in COMMON.items() if name != "compute"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in common.items()]
    main(["run", *flags, "--architecture", "gossip(ring)", "--engine", "process", "--out", "real"])
    run = gradwire.simulate(**COMMON, architecture="gossip(ring)")
    lines = (tmp_path / "real" / "metrics.jsonl").read_text().splitlines()
    names = ("step", "test_loss", "test_accuracy", "test_accuracy_min", "test_accuracy_max")
    assert [[json.loads(line)[name] for name in names] for line in lines] == [
        [row[name] for name in names] for row in run.metrics
    ]
