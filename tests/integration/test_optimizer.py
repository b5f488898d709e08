"""gradwire.DistributedOptimizer in plain loops, and the functions of Horovod's convention."""

from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from integration.measured_cases import MEASURED
from integration.optimizer_cases import METHODS, REMEMBER_THE_MEAN, SIZE
from integration.optimizer_cases import run as run_cases
from integration.other_models import COMPRESSIONS
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("optimizer")
    codes, results = launch(folder, SIZE, f"integration.optimizer_cases:{run_cases.__name__}", 300)
    assert codes == [0] * SIZE
    return results


def test_identity_is_ddp_bit_for_bit(ranks):
    for result in ranks:
        assert result["exact"] == {"sequential": 0.0, "wfbp": 0.0, "fusion": 0.0}


@pytest.mark.parametrize(("compression", "scheduling"), METHODS)
def test_trajectories_are_those_of_the_simulator(ranks, compression, scheduling):
    for result in ranks:
        difference, is_same = result["golden"][f"{compression} {scheduling}"]
        assert difference < 1e-6
        assert is_same


def test_gradients_of_several_passes_add_up(ranks):
    assert all(result["passes"] < 1e-6 for result in ranks)


def test_closures(ranks):
    assert [result["closure"] for result in ranks] == [0.0] * SIZE


@pytest.mark.parametrize("name", ["groups", "unused", "broadcast"])
def test_replicas_stay_equal(ranks, name):
    assert all(result[name] for result in ranks)


def test_training_continues_after_a_backward_pass_that_was_interrupted(ranks):
    for result in ranks:
        messages, steps, is_same = result["interrupted"]["sequential"]
        assert messages[0] == "something is wrong here"
        assert "call zero_grad() and go on" in messages[1]
        assert len(messages) == 2
        assert steps == 4
        assert is_same


def test_gradients_that_were_sent_before_an_interruption_are_not_mixed_with_others(ranks):
    for result in ranks:
        messages, steps, is_same = result["interrupted"]["wfbp"]
        assert "start again from a checkpoint" in messages[2]
        assert steps == 2
        assert is_same


def test_layers_that_are_frozen_for_some_time(ranks):
    for result in ranks:
        *are_good, not_averaged, without_names = result["frozen"]
        assert are_good == [True, True, True]
        assert "parameter 0 of group 0 ([16, 12]) was frozen" in not_averaged
        assert "2 of the 2 parameters of the group were not in named_parameters" in without_names


@pytest.mark.parametrize("compression", REMEMBER_THE_MEAN)
def test_gradients_may_be_changed_in_place(ranks, compression):
    assert all(result["in place"][compression] == 0.0 for result in ranks)


def test_a_state_is_saved_again_before_the_first_step(ranks):
    assert all(result["resaved"] for result in ranks)


def test_sparse_gradients_are_refused_or_made_dense(ranks):
    for result in ranks:
        refused, is_same = result["sparse"]
        assert "the gradient of 0.weight is sparse" in refused
        assert "sparse_as_dense=True" in refused
        assert is_same


def test_a_compressor_of_the_users_own(ranks):
    for result in ranks:
        is_same, difference = result["own"]
        assert is_same
        assert 0 < difference < 1e-2


def test_schedulers_of_the_learning_rate_keep_working(ranks):
    assert all(result["scheduler"] == [0.025, 0.0125, 0.00625] for result in ranks)


def test_a_saved_run_continues(ranks):
    assert [result["continued"] for result in ranks] == [0.0] * SIZE


def test_reductions(ranks):
    assert all(result["reduced"] == [0.5, 1.0] for result in ranks)


def test_a_grad_scaler_skips_the_step_on_all_ranks(ranks):
    assert all(result["scaled"] == [[True, False, True, True], True] for result in ranks)


@pytest.mark.parametrize("name", MEASURED)
def test_buckets_that_are_measured_are_the_same_everywhere(ranks, name):
    for result in ranks:
        before, after, is_equal, steps, is_same, difference = result["measured"][name]
        assert before == "mgwfbp"
        assert after.startswith("mgwfbp(")
        assert is_equal
        assert steps == 10
        assert is_same
        if name == "identity":
            assert difference < 1e-6
    assert len({result["measured"][name][1] for result in ranks}) == 1


def test_buckets_are_measured_where_gradients_add_up_or_have_several_types(ranks):
    for result in ranks:
        assert result["accumulated"][1].startswith("mgwfbp(")
        assert result["accumulated"][2:5] == [True, 10, True]
        assert result["types"]


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_other_models(ranks, name):
    for result in ranks:
        is_same, difference = result["shapes"][name]
        assert is_same
        assert difference < (1e-2 if "float16" in name else 1e-6)  # DDP divides before it adds


def test_hooks_of_steps_run_once(ranks):
    assert all(result["hooks"] == 2 for result in ranks)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compression": "tpok(0.1)"}, "tpok"),
        ({"compression": 3}, "a compression is an expression"),
        ({"scheduling": "priority"}, "the next forward pass starts when step"),
        ({"scheduling": "dear"}, "the next forward pass starts when step"),
        ({"synchronization": "asp"}, "averages gradients in every step"),
        ({"architecture": "gossip(ring)"}, "all ranks form means together"),
        ({"backward_passes_per_step": 0}, "at least 1, got 0"),
        ({"named_parameters": [("a", torch.zeros(1))]}, "2 of the 2 parameters"),
        ({"named_parameters": [("a", torch.zeros(1))] * 2}, "more than once: a"),
    ],
)
def test_refusals(options, match):
    with pytest.raises(ValueError, match=match):
        gradwire.DistributedOptimizer(_optimizer(), **options)


def test_without_processes_it_says_how_to_start(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node 2"):
        gradwire.init()
    optimizer = gradwire.DistributedOptimizer(_optimizer())
    with pytest.raises(RuntimeError, match="init_process_group"):
        optimizer.param_groups[0]["params"][0].sum().backward()
