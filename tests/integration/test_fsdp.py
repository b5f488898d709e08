"""Shards inside a node, compression between nodes: FSDP2 with gradwire.compress_replicas."""

from typing import Any

import pytest
import torch.distributed.fsdp as fsdp

from integration.fsdp_cases import LOOPS, SAVED
from runtime.process.launching import launch

pytestmark = pytest.mark.skipif(
    not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"),
    reason="this torch has no FSDPModule.set_all_reduce_hook (2.7 has)",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("fsdp")
    codes, results = launch(folder, 4, "integration.fsdp_cases:run", 300)
    assert codes == [0] * 4
    return results


def test_identity_is_native_hsdp(ranks):
    for result in ranks:
        difference, is_same, steps, sent = result["identity"]
        assert difference == 0
        assert is_same
        assert steps == 4
        assert sent > 0


@pytest.mark.parametrize("name", ["ef(topk(0.2))", "powersgd(1)", "ef(sign)"])
def test_replicas_stay_equal(ranks, name):
    for result in ranks:
        difference, is_same, steps, _ = result[name]
        assert is_same
        assert 0 < difference < 0.1
        assert steps == 4


def test_exchanges_overlap_the_backward_pass(ranks):
    assert all(result["overlaps"] for result in ranks)


def test_hooks_refuse_to_continue_after_an_interrupted_backward_pass_and_new_ones_do(ranks):
    for result in ranks:
        was_raised, refused, is_same, steps = result["interrupted"]
        assert was_raised
        assert "an earlier backward pass has failed when some of its gradients" in refused
        assert "call compress_replicas" in refused
        assert is_same
        assert steps == 3


@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_that_are_no_views_are_those_of_native_hsdp(ranks, loop):
    for result in ranks:
        difference, of_hooks, norm = result["alike"][loop]
        assert difference < (1e-2 if loop == "cast" else 1e-6)
        assert of_hooks < 1e-6
        assert (norm > 0) == (loop == "hooked")


def test_a_model_that_is_not_sharded_is_refused(ranks):
    assert all("has no FSDP module: shard it first" in result["refused"] for result in ranks)


def test_groups_that_do_not_hold_replicas_are_refused(ranks):
    for rank, result in enumerate(ranks):
        own, replicas = [rank - rank % 2, rank - rank % 2 + 1], [rank % 2, rank % 2 + 2]
        for name, group in (("shard", own), ("world", [0, 1, 2, 3])):
            text = result["groups"][name]
            assert f"group has the ranks {group}, and 0.weight is sharded over the ranks {own}" in (
                text
            )
            assert f"(this is rank {rank}), so different shards would be averaged" in text
            assert 'mesh["replicate"].get_group()' in text
        text = result["groups"]["hybrid"]
        assert "FSDP itself averages the replicas of 0.weight" in text
        assert f"which has the ranks {replicas} of group as well" in text
        assert 'fully_shard(model, mesh=mesh["shard"])' in text


def test_rules_see_the_names_of_parameters(ranks):
    expected = [["0.weight", "0.bias"], ["2.weight", "2.bias"], ["4.weight", "4.bias"]]
    assert [result["names"] for result in ranks] == [expected] * 4


def test_a_saved_run_continues(ranks):
    assert [result["continued"] for result in ranks] == [0.0] * 4


@pytest.mark.parametrize("name", SAVED)
def test_a_distributed_checkpoint_continues_with_the_same_bits(ranks, name):
    for result in ranks:
        is_equal, without_the_rest, is_same = result["checkpoint"][name]
        assert is_equal
        assert not without_the_rest
        assert is_same


def test_a_checkpoint_of_more_replicas(ranks):
    for result in ranks[:2]:
        refused, loaded, difference, has_residuals = result["fewer"]
        assert "replicas, this model has 1: load replicas.saved_by(2)" in refused
        assert loaded == ""
        assert difference < 1e-6
        assert has_residuals
