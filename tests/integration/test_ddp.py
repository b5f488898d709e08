"""gradwire as a communication hook of DistributedDataParallel."""

from typing import Any

import pytest

from integration import ddp_cases
from integration.ddp_cases import COMPRESSIONS, SIZE
from integration.ddp_cases import run as run_cases
from integration.golden import HOOKS
from integration.other_models import COMPRESSIONS as COMPRESSIONS_OF_OTHERS
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("ddp")
    codes, results = launch(folder, SIZE, f"integration.ddp_cases:{run_cases.__name__}", 300)
    assert codes == [0] * SIZE
    return results


def test_fp16_is_torchs_hook_bit_for_bit(ranks):
    assert [result["halves"] for result in ranks] == [0.0, 0.0]


def test_identity_is_ddp_bit_for_bit(ranks):
    assert [result["exact"] for result in ranks] == [0.0] * SIZE
    assert all(0 < result["near"] < 1e-3 for result in ranks)


@pytest.mark.parametrize("text", COMPRESSIONS)
def test_replicas_stay_equal(ranks, text):
    assert all(result["same"][text] for result in ranks)


def test_nothing_is_lost_when_ddp_rebuilds_its_buckets(ranks):
    for result in ranks:
        assert max(result["owed"]) < 1e-6


def test_gradients_accumulate_under_no_sync(ranks):
    assert [result["accumulated"] for result in ranks] == [0.0] * SIZE


def test_parameters_without_gradient(ranks):
    assert all(result["unused"] for result in ranks)


def test_a_grad_scaler_skips_the_step_on_all_ranks(ranks):
    for result in ranks:
        for step, (has_moved, has_kept, is_same, _) in enumerate(result["scaled"]):
            assert has_moved == (step != 2)
            assert has_kept == (step == 2)
            assert is_same
        scales = [row[3] for row in result["scaled"]]
        assert scales == [8.0, 8.0, 4.0, 4.0, 4.0]


def test_a_saved_run_continues(ranks):
    assert [result["continued"] for result in ranks] == [0.0] * SIZE


def test_a_state_is_loaded_by_another_number_of_ranks(ranks):
    for result in ranks:
        (of_a_rank, of_some, of_another), difference = result["resized"]
        assert "that of rank 2 of 3" in of_a_rank
        assert "states of the ranks [0, 1], expected those of all 3" in of_some
        assert "is of ef(sign), this is ef(topk(0.1))" in of_another
        assert difference < 1e-5


def test_stats(ranks):
    for result in ranks:
        stats = result["stats"]
        assert stats["before"] == 0
        assert stats["steps"] == 4
        assert stats["sent"] > 0
        assert all(seconds > 0 for seconds in stats["times"])
        assert "gradwire: wait" in stats["ranges"]
        counted, of_transport = stats["counted"]  # of all models so far
        assert counted == of_transport > 10 * stats["sent"]
        assert stats["ratio"] > 1
    written = ranks[0]["stats"]["written"]
    assert {step for _, _, step in written} == {2, 4}
    assert {name for name, _, _ in written} >= {"gradwire/bytes_sent", "gradwire/exposed_s"}
    assert ranks[1]["stats"]["written"] == []
    # What one sends the other receives.
    assert ranks[0]["stats"]["sent"] == ranks[1]["stats"]["received"]


@pytest.mark.parametrize("name", COMPRESSIONS_OF_OTHERS)
def test_other_models(ranks, name):
    assert all(result["shapes"][name] for result in ranks)


def test_gradients_may_be_views_of_buckets(ranks):
    assert all(result["views"] for result in ranks)


@pytest.mark.parametrize(("compression", "rebuilds"), HOOKS)
def test_trajectories_are_those_of_the_simulator(ranks, compression, rebuilds):
    for result in ranks:
        difference, is_same = result["golden"][f"{compression} {rebuilds}"]
        assert difference < 1e-6
        assert is_same


def test_torch_distributed_may_be_initialized_again(tmp_path):
    name = ddp_cases.initialized_again.__name__
    codes, results = launch(tmp_path, SIZE, f"integration.ddp_cases:{name}", 300)
    assert codes == [0] * SIZE
    assert results == [[2, 2]] * SIZE
