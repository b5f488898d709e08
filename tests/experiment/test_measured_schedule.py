"""Schedules of real processes decide by what was measured; all ranks and resumed runs alike."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from experiment.schedule_cases import LONGER, SIZE, TINY
from experiment.schedule_cases import run as run_cases
from gradwire.experiment.processes.node.drift import Drift
from gradwire.experiment.run.config import Config
from gradwire.experiment.run.record import Record
from gradwire.experiment.run.setup import prepare
from gradwire.runtime.network.network import Network
from gradwire.runtime.virtual.engine import VirtualEngine
from gradwire.training.program import train
from gradwire.training.regroup import regroup
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("schedules")
    codes, results = launch(folder, SIZE, f"experiment.schedule_cases:{run_cases.__name__}", 90)
    assert codes == [0] * SIZE
    return folder, results


def test_all_ranks_have_the_schedule_that_rank_0_decided_on(ranks):
    _, results = ranks
    assert {scheduling for result in results for scheduling in result["mgwfbp"]} == {"mgwfbp((1,))"}
    assert results[0]["priority"] == results[1]["priority"] != "priority"


@pytest.mark.parametrize("name", ["priority", "mgwfbp"])
def test_the_record_has_what_was_decided_and_the_simulator_the_same_bits(ranks, name):
    folder, results = ranks
    recorded = Record.open(folder / name).config.scheduling
    assert recorded.startswith(f"{name}(")
    simulated = gradwire.simulate(**TINY, scheduling=recorded, compute="fixed(0.001)")
    saved = torch.load(folder / name / "model.pt", weights_only=True)
    assert torch.equal(saved["params"], simulated.params)
    if name == "mgwfbp":  # the measurement counts neither in the ledger nor in the times of calls
        assert results[0]["bytes_sent"] == simulated.summary["bytes_sent"]
        # Only virtual workers join the pieces of a model: see training/pieces.py.
        calls = simulated.summary["call_time_s"].keys() - {"concatenate"}
        assert results[0]["calls"] == sorted(calls)


def test_layers_and_exchanges_are_measured(ranks):
    _, results = ranks
    assert results[1]["profiles"] == []  # rank 0 makes the profile, the others receive it
    ((forward_s, backward_s, prices),) = results[0]["profiles"]
    assert len(forward_s) == len(backward_s) == 2
    assert all(0 < seconds < 10 for seconds in (*forward_s, *backward_s))
    assert [numel for numel, *_ in prices] == [16, 38, 152, 610]
    assert all(busy_s + delay_s > 0 for _, busy_s, delay_s in prices)


def test_with_servers_nothing_is_measured_since_workers_may_come_later():
    config = Config(**TINY, engine="process", scheduling="mgwfbp")
    assert prepare(config).measures_schedule
    served = Config(**TINY, engine="process", scheduling="mgwfbp", architecture="parameter_server")
    experiment = prepare(served)
    assert not experiment.measures_schedule
    assert experiment.config.scheduling.startswith("mgwfbp((")


def test_after_a_drift_ranks_continue_with_other_groups_and_all_residuals(ranks):
    folder, results = ranks
    (step, scheduling), *more = results[0]["drifted"][0]
    assert scheduling == "mgwfbp((2,))"
    assert not more
    plans = [
        prepare(Config(**LONGER, scheduling=text, compute="fixed(0.001)")).plan
        for text in ("mgwfbp((1,))", scheduling)
    ]

    def trained(plan, replicas, first, last):
        engine = VirtualEngine(
            Network.uniform(SIZE), evaluate=plan.task.gradients, profile=plan.profile
        )
        return engine.run([lambda node: train(plan, node, replicas[node.rank], first, last)] * SIZE)

    before = trained(plans[0], plans[0].initial_replicas(), 0, step)
    after = trained(plans[1], regroup(before, *plans), step, plans[1].num_steps)
    saved = torch.load(folder / "drifted" / "model.pt", weights_only=True)
    assert torch.equal(saved["params"], after[0].params)


def test_a_run_is_resumed_with_the_groups_it_had(ranks):
    _, results = ranks
    for result in results:
        first, continued = result["drifted"]
        assert first == continued
        assert result["is_same"]


def test_drift_is_several_segments_that_are_off():
    now_s = 0.0
    drift = Drift(lambda: now_s)
    assert not drift.note(5.0, 10)  # the first one does not count
    assert not any(drift.note(own, 10) for own in (1.0, 4.0, 0.9))  # their median is usual
    assert not any(drift.note(own, 10) for own in (1.2, 1.3, 1.3, 0.9, 1.3, 1.3))
    assert not drift.note(0.001, 10)  # too short to say anything
    assert drift.note(1.3, 10)
    drift.note_decision(2.0)
    times = [3.0, 1.3, 1.3, 1.3, 0.9, 0.9, 0.9]  # 1.3 is usual now
    assert not any(drift.note(own, 10) for own in times)
    now_s = 40.0  # 20 times the duration of the measurement
    assert drift.note(0.9, 10)
