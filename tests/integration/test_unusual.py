"""Loops that are less usual: each of these once went wrong without a word."""

from typing import Any

import pytest

from integration import unusual_cases
from integration.unusual_cases import SIZE
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("unusual")
    codes, results = launch(folder, SIZE, "integration.unusual_cases:run", 300)
    assert codes == [0] * SIZE
    return results


def test_a_scheduler_that_was_made_before_the_wrapper(ranks):
    for result in ranks:
        without, with_scheduler = result["scheduler"]
        assert without == with_scheduler
        assert "something is wrong here; RuntimeError" in result["refused"]
        assert "the backward pass has not ended, or has failed" in result["refused"]


@pytest.mark.parametrize("name", ["hook", "optimizer"])
def test_residuals_do_not_depend_on_the_scale_of_losses(ranks, name):
    for result in ranks:
        assert result["scale"][name]
        assert not result["unscaled"]  # so the check would find it


def test_residuals_are_kept_where_buckets_get_more_tensors(ranks):
    assert all(result["grown"] < 1e-5 for result in ranks)


def test_parameters_without_elements(ranks):
    assert all(result["empty"] for result in ranks)


@pytest.mark.parametrize("name", ["hook", "optimizer"])
def test_checkpoints_whose_gradients_come_first(ranks, name):
    for result in ranks:
        refused, _, accepted, is_same = result["reentrant"][name]
        assert "use_reentrant=False" in refused
        assert accepted == ""
        assert is_same


def test_programs_that_have_ended_are_forgotten(ranks):
    for result in ranks:
        early, late = result["tasks"]
        assert late <= early + 2


def test_ranks_with_fewer_batches_in_torchs_context(tmp_path):
    codes, results = launch(
        tmp_path, SIZE, f"integration.unusual_cases:{unusual_cases.joined.__name__}", 300
    )
    assert codes == [0] * SIZE
    assert any("DDP exchanges a bucket outside of a backward pass" in text for text in results)


def test_a_state_that_is_loaded_on_one_rank_only(tmp_path):
    name = unusual_cases.loaded_on_one_rank.__name__
    codes, results = launch(tmp_path, SIZE, f"integration.unusual_cases:{name}", 300)
    assert codes == [0] * SIZE
    for first, second in results:
        assert "DifferentSettingsError" in first
        assert "rank 1 has loaded 1" in first
        assert "DifferentSettingsError" in second  # and not that a future was cancelled
