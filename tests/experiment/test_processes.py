"""Runs on real processes: what they leave is what the simulator leaves, and errors are clear."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradwire
from experiment.process_cases import CASES, SIZE, SLOW_S, TINY, rows
from experiment.process_cases import run as run_cases
from gradwire.experiment.processes.differences import differences, summarize_differences
from gradwire.experiment.processes.node.state import NodeState
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.setup import prepare
from runtime.process.launching import launch

SAME = ("step", "epoch", "train_loss", "test_loss", "test_accuracy", "bytes_sent", "distance")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("processes")
    codes, results = launch(folder, SIZE, f"experiment.process_cases:{run_cases.__name__}", 90)
    assert codes == [0] * SIZE
    return folder, results


@pytest.mark.parametrize("name", CASES)
def test_records_are_the_simulators(ranks, name):
    folder = ranks[0] / name
    simulated = gradwire.simulate(**TINY | CASES[name], compute="fixed(0.001)")
    assert [[row[n] for n in SAME] for row in rows(folder)] == [
        [row[n] for n in SAME] for row in simulated.metrics
    ]
    saved = torch.load(folder / "model.pt", weights_only=True)
    assert torch.equal(saved["params"], simulated.params)
    summary = json.loads((folder / "summary.json").read_text())
    for figure in ("bytes_by_link", "bytes_by_tensor", "messages_sent", "gradients", "noted"):
        assert summary[figure] == simulated.summary[figure]
    assert summary["config"]["engine"] == "process"
    assert summary["bytes_handed_over"] >= summary["bytes_sent"] > 0
    assert 0 < summary["compute_time_s"] + summary["wait_time_s"] <= summary["training_time_s"]
    assert 0 < summary["worker_time_s"] <= summary["training_time_s"]
    assert summary["training_time_s"] <= summary["wall_time_s"]


def test_a_run_that_never_pauses_is_evaluated_at_the_end(ranks):
    folder, results = ranks
    for result in results:
        assert result["asynchronous"]["steps"] == [4, 8, 12, 16, 20]
        assert result["asynchronous"]["distance"] > 0
    times = [row["time_s"] for row in rows(folder / "asynchronous")]
    assert times == sorted(times)
    assert not (folder / "asynchronous" / "checkpoints").exists()


def test_an_evaluation_may_take_longer_than_silence(ranks):
    assert all(result["slow"] == [4] for result in ranks[1])


def test_interrupted_twice_and_damaged_it_ends_in_the_same_bits(ranks):
    folder, results = ranks
    for result in results:
        (first, text), (second, _) = result["interrupted"]["told"]
        assert first == second == 15
        assert "SIGTERM" in text
        assert "gradwire run --resume" in text
        assert result["interrupted"]["steps"] == [4, 8, 12, 16, 20]
    whole, resumed = (
        torch.load(folder / name / "model.pt", weights_only=True)
        for name in ("feedback", "interrupted")
    )
    assert torch.equal(whole["params"], resumed["params"])
    for name in ("bytes_by_link", "gradients", "test_loss"):
        a, b = (
            json.loads((folder / run / "summary.json").read_text())[name]
            for run in ("feedback", "interrupted")
        )
        assert a == b
    kept = sorted(path.name for path in (folder / "interrupted" / "checkpoints").iterdir())
    assert kept == ["complete", "step-000016", "step-000020"]
    assert not list(folder.rglob("*.tmp"))


def test_a_checkpoint_takes_as_long_as_the_slowest_rank(ranks):
    first, *others = (result["slow disk"] for result in ranks[1])
    assert len(first) == 2
    assert min(first) >= 0.9 * SLOW_S
    assert not any(others)


def test_a_run_whose_evaluation_fails_loses_no_steps(ranks):
    folder, results = ranks
    assert all(result["crashed"]["saved"] == ["step-000004", "step-000008"] for result in results)
    assert results[0]["crashed"]["told"] == [8, 12, 16, 20]  # that of step 8 is made up for
    whole, resumed = (
        [[row[n] for n in SAME] for row in rows(folder / name)] for name in ("feedback", "crashed")
    )
    assert whole == resumed
    models = [
        torch.load(folder / name / "model.pt", weights_only=True)["params"]
        for name in ("feedback", "crashed")
    ]
    assert torch.equal(*models)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("simulated", ("bandwidth, faults", "simulator")),
        ("only one", ("unknown data set 'nowhere'",)),
        ("there", ("already holds a run", "--resume")),
        ("servers", ("parameter_server(2) makes 6 ranks, but there are 3",)),
        ("ranks", ("makes 2 ranks, but there are 3",)),
    ],
)
def test_all_ranks_hear_why_a_run_cannot_begin(ranks, name, words):
    texts = {result["refused"][name] for result in ranks[1]}
    (text,) = texts
    assert all(word in text for word in words)


def test_every_rank_hears_in_which_settings_it_differs(ranks):
    first, second, third = (result["refused"]["different"] for result in ranks[1])
    size = TINY["batch_size"]
    assert second == (
        f"rank 1 has batch_size = 5 where rank 0 has batch_size = {size}, "
        "seed = 3 where rank 0 has seed = 0"
    )
    assert third == "rank 2 has seed = 7 where rank 0 has seed = 0"
    assert first == f"{second}; {third}"


def test_differences_are_told_of_some_of_many_ranks():
    toml = Config(seed=0).to_toml()
    configs = [toml, *(Config(seed=seed).to_toml() for seed in (0, 1, 2, 3, 4, 5))]
    found = differences(configs, 0, lambda rank: f"rank {rank}")
    assert sorted(found) == ["2", "3", "4", "5", "6"]
    text = summarize_differences(found)
    assert text.startswith("rank 2 has seed = 1 where rank 0 has seed = 0; rank 3 has")
    assert text.endswith("; and 2 more differ")


@pytest.mark.parametrize(
    ("synchronization", "architecture", "words"),
    [
        ("asp", "gossip(ring, adpsgd)", "there is no checkpoint; begin again"),
        ("diloco(4, delay=1)", "allreduce", "there is no checkpoint; begin again"),
        ("asp", "parameter_server", "Resume from the state of the servers"),
    ],
)
def test_how_to_go_on_after_an_end_follows_from_what_is_kept(synchronization, architecture, words):
    settings = {"synchronization": synchronization, "architecture": architecture}
    plan = prepare(Config(**{**TINY, **settings, "engine": "process"})).plan
    node = SimpleNamespace(folder=Path("runs/a"), plan=plan, _is_started_by_hand=False)
    text = NodeState._resume_advice(node)
    assert words in text
    assert text.endswith(": gradwire run --resume runs/a")


def test_run_needs_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        gradwire.run(workers=2)


def test_simulate_is_for_the_simulator():
    with pytest.raises(ValueError, match=r"gradwire\.run"):
        gradwire.simulate(engine="process")
