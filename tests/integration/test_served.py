"""gradwire.DistributedOptimizer with servers, and what happens when nodes fail."""

from collections.abc import Sequence
from typing import Any

import pytest

from integration import served_failures
from integration.served_cases import METHODS, NUM_SERVERS, PUSHED, SIZE
from integration.serving import Job, run_jobs

SECONDS = 60.0  # on a loaded machine; alone it is two
CASES = "integration.served_cases"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    folder = tmp_path_factory.mktemp("served")
    names = (f"{CASES}:{name}" for name in ("run", "staleness", "uneven"))
    return run_jobs(folder, SIZE, NUM_SERVERS, *names)


@pytest.fixture(scope="module")
def ranks(jobs: list[Job]) -> list[Any]:
    assert jobs[0].workers == [0] * SIZE
    return jobs[0].results


def test_all_nodes_end(jobs):
    for job in jobs:
        assert job.workers == [0] * SIZE
        assert job.others == [0] * (NUM_SERVERS + 1)


def test_ranks_and_sizes(ranks):
    assert [result["names"][:2] for result in ranks] == [[0, 2], [1, 2]]


def test_identity_is_ddp(ranks):
    for result in ranks:
        assert set(result["exact"]) == {"sequential", "wfbp", "fusion"}
        for difference, is_same in result["exact"].values():
            assert difference < 1e-6
            assert is_same


@pytest.mark.parametrize(("compression", "architecture", "scheduling"), METHODS)
def test_trajectories_are_those_of_the_simulator(ranks, compression, architecture, scheduling):
    for result in ranks:
        difference, is_same = result["golden"][f"{compression} {architecture} {scheduling}"]
        assert difference < 1e-6
        assert is_same


def test_groups_that_are_added_later(ranks):
    assert all(result["groups"] for result in ranks)


def test_a_grad_scaler_skips_the_step_everywhere(ranks):
    assert all(result["scaled"] == [[True, False, True], True] for result in ranks)


def test_a_saved_run_continues(ranks):
    for result in ranks:
        assert result["continued"]["bsp"] == 0.0
        assert result["continued"]["ssp(0)"] < 1e-5  # its model was a sum, and is now whole


def test_bytes_are_counted(ranks):
    for result in ranks:
        steps, sent, received = result["bytes"]
        assert steps == 4
        assert 1.0 <= sent < 2.0
        assert 1.0 <= received < 2.0
        steps, sent, received = result["pushed"]
        assert steps == 4
        assert 1 / 32 <= sent < 0.5
        assert 1.0 <= received < 2.0


@pytest.mark.parametrize("compression", PUSHED)
def test_a_staleness_of_zero_is_bsp(ranks, compression):
    for result in ranks:
        difference, is_same = result["clocks"][compression]
        assert is_same
        assert difference < (1e-5 if compression == "identity" else 0.2)


@pytest.mark.parametrize("rule", ["asp", "ssp"])
def test_servers_that_hold_the_model_train_it(ranks, rule):
    for result in ranks:
        before, after = result[rule]
        assert after < 0.8 * before


def test_optimizers_are_the_workers_own(ranks):
    assert all(result["adam"] and result["two"] for result in ranks)


def test_schedulers_of_the_learning_rate_and_closures(ranks):
    assert all(result["schedulers"] == [1.0, 0.0, 0.0] for result in ranks)


def test_of_a_state_that_is_refused_nothing_is_loaded(ranks):
    for result in ranks:
        refused, rate = result["refused state"]
        assert "the saved state has compression = ef(sign), this worker ef(topk(0.1))" in refused
        assert rate == 0.01


def test_what_does_not_go_together_is_refused(ranks):
    for result in ranks:
        refused = result["refused"]
        assert "launched with 2" in refused["servers"]
        assert "gradwire launch --servers 3" in refused["servers"]
        assert 'optimizer="server"' in refused["optimizer"]
        assert "parameter_server" in refused["allreduce"]
        assert "pushes on its own" in refused["powersgd"]
        assert "gradwire.local_sgd" in refused["rule"]


def test_no_worker_is_further_ahead_than_allowed(jobs):
    assert jobs[1].results[0] == 2  # it got that far, and no further
    assert jobs[1].results[1] <= 2


def test_a_worker_that_ends_earlier_blocks_nobody(jobs):
    assert jobs[2].results == [10, 3]


QUICK = ("different_compressions", "killed")
SLOW = (
    "different_models",
    "different_rules",
    "raised",
    "server_killed",
    "killed_without_means",
    "not_finite",
)


def run_failures(factory: pytest.TempPathFactory, names: Sequence[str]) -> dict[str, Job]:
    cases = (f"integration.served_failures:{name}" for name in names)
    size, num_servers = served_failures.SIZE, served_failures.NUM_SERVERS
    return dict(zip(names, run_jobs(factory.mktemp("failures"), size, num_servers, *cases)))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return run_failures(tmp_path_factory, QUICK)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return run_failures(tmp_path_factory, SLOW)


def check_different(job: Job, setting: str) -> None:
    for rank, (name, text, seconds) in enumerate(job.results):
        assert name == "DifferentSettingsError"
        assert setting in text
        assert f"this is rank {rank}" in text
        assert seconds < SECONDS


def check_lost(job: Job, codes: list[int]) -> None:
    assert job.workers == codes
    assert job.others == [0] * 3
    for rank in (0, 2):
        name, text, seconds = job.results[rank]
        assert name == "NodeLost"
        assert "worker 1" in text
        assert seconds < SECONDS


def test_different_compressions(quick):
    check_different(quick["different_compressions"], "compression = ef(topk(0.1)), rank 1 ef(sign)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "setting"),
    [
        ("different_models", "tensors = "),
        ("different_rules", "synchronization = bsp, rank 2 asp"),
    ],
)
def test_different_settings(failures, case, setting):
    check_different(failures[case], setting)


def test_a_killed_worker_is_named(quick):
    check_lost(quick["killed"], [0, 7, 0])


@pytest.mark.slow
def test_a_worker_that_raises_and_leaves_is_named(failures):
    check_lost(failures["raised"], [0, 0, 0])


@pytest.mark.slow
def test_a_killed_server_is_named(failures):
    job = failures["server_killed"]
    assert job.others[1] == -9
    for name, text, seconds in job.results:
        assert name == "NodeLost"
        assert "server 1" in text
        assert seconds < SECONDS


@pytest.mark.slow
def test_others_continue_without_a_worker_if_servers_hold_the_model(failures):
    job = failures["killed_without_means"]
    assert job.workers == [0, 7, 0]
    assert job.others == [0] * 3
    assert [job.results[rank][0] for rank in (0, 2)] == ["", ""]


@pytest.mark.slow
def test_updates_that_are_not_finite(failures):
    job = failures["not_finite"]
    assert [result[0] for result in job.results] == ["", "NonFiniteError", ""]
    assert "in the update of 0.weight on rank 1" in job.results[1][1]


def test_the_launch_command_is_told(monkeypatch):
    for name in ("DMLC_PS_ROOT_URI", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)
    told = served_failures.without_launch()
    assert "gradwire launch --workers 2 --servers 2 -- python train.py" in told
