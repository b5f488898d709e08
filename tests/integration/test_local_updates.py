"""gradwire.local_sgd and gradwire.diloco in plain loops."""

from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from gradwire.core.errors import WireError
from gradwire.integration.exchange import packed
from gradwire.integration.local_updates.rounds import Notice, read_notice
from integration import local_updates_cases as cases
from integration.local_updates_cases import AVERAGES, METHODS, UNEVEN
from integration.local_updates_golden import DILOCO, LOCAL_SGD, SIZE, diloco_text
from runtime.process.launching import launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("local_updates")
    codes, results = launch(folder, SIZE, f"{cases.__name__}:{cases.run.__name__}", 300)
    assert codes == [0] * SIZE
    return results


@pytest.mark.parametrize(("compression", "momentum"), LOCAL_SGD)
def test_local_sgd_is_that_of_the_simulator(ranks, compression, momentum):
    for result in ranks:
        difference, is_same = result["local_sgd"][f"{compression} {momentum}"]
        assert difference < 1e-6
        assert is_same


@pytest.mark.parametrize(("compression", "settings"), DILOCO)
def test_diloco_is_that_of_the_simulator(ranks, compression, settings):
    for result in ranks:
        difference, is_same = result["diloco"][f"{compression} {diloco_text(settings)}"]
        assert difference < 1e-6
        assert is_same


def test_averages_after_every_step_are_ddp(ranks):
    assert all(result["ddp"] < 1e-6 for result in ranks)


def test_replicas_are_equal_after_each_average(ranks):
    for result in ranks:
        assert result["averages"] == AVERAGES


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_with_fewer_steps_wait_for_the_others(ranks, name):
    assert [result["uneven"][name] for result in ranks] == [[13, True], [4, True]]


def test_a_grad_scaler_may_skip_a_step_of_one_rank(ranks):
    assert [result["scaled"] for result in ranks] == [[6, True], [5, True]]


def test_statistics_of_batch_normalisation_are_averaged(ranks):
    for result in ranks:
        difference, is_same, num_batches = result["norms"]
        assert difference < 1e-6
        assert is_same
        assert num_batches == 4  # the larger one


def test_all_begin_with_the_model_of_rank_0(ranks):
    assert all(result["start"] == [True] * 5 for result in ranks)


def test_buffers_of_other_types(ranks):
    for result in ranks:
        mask, counts, waves = result["buffers"]
        assert mask == [True, False, True]
        assert counts == [0, 5]
        assert waves == [[1.0, 2.0], [0.0, 0.0]]


def test_parameters_of_two_types(ranks):
    assert all(result["types"] for result in ranks)


def test_any_outer_optimizer(ranks):
    for result in ranks:
        is_same, lr, difference = result["outer"]
        assert is_same
        assert lr == 0.005
        assert difference < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_a_run_that_is_saved_in_the_middle_of_a_round_continues(ranks, name):
    assert [result["continued"][name] for result in ranks] == [0.0] * SIZE


def test_stats(ranks):
    for result in ranks:
        dense, sparse = result["stats"]["dense"], result["stats"]["sparse"]
        for stats in (dense, sparse):
            assert stats["before"] == [0, 0]
            assert stats["steps"] == 8
            assert stats["dense"] == 8 * 4 * stats["numel"]  # of two ranks each sends all of it
            assert stats["exposed"] > 0
        assert 3.8 < dense["ratio"] < 4
        assert sparse["ratio"] > 2 * dense["ratio"]
    for name in ("dense", "sparse"):  # what one sends the other receives
        assert ranks[0]["stats"][name]["sent"] == ranks[1]["stats"][name]["received"]


def test_nan_is_refused_on_all_ranks_and_its_rank_is_named(ranks):
    for rank, result in enumerate(ranks):
        text, still_works = result["nonfinite"]
        assert "in the parameters of rank 1" in text
        assert f"this is rank {rank}" in text
        assert still_works


def test_an_exception_leaves_the_context_without_an_exchange(ranks):
    assert [result["left"] for result in ranks] == [False, False]


def test_refusals_that_depend_on_the_model(ranks):
    for result in ranks:
        fragments, has_hook, other_method, other_parts, other_compression = result["refused"]
        assert "fragments=7, but the model has 6 tensors" in fragments
        assert not has_hook
        assert "load the state of the same model and settings" in other_method
        assert "of 2 parts, this has 3" in other_parts
        assert "the saved state is of identity, this is ef(sign)" in other_compression


def test_parameters_that_are_added_later_are_refused(ranks):
    for result in ranks:
        assert "the optimizer has 8 parameters, 6 when this was made" in result["added"]


def test_a_compression_without_feedback_warns_where_it_was_chosen(ranks):
    for result in ranks:
        assert result["warned"] == [[["UnfedWarning", "local_updates_cases.py"]]] * 2


def _linear() -> nn.Module:
    return nn.utils.skip_init(nn.Linear, 3, 2)  # draws nothing


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _linear()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("local_sgd", {"period": 0}, "at least 1, got 0"),
        ("local_sgd", {"period": 2.5}, "whole number of at least 1, got 2.5"),
        ("local_sgd", {"compression": "tpok(0.1)"}, "tpok"),
        ("local_sgd", {"momentum": "mean"}, '"local", "average" or "reset", got \'mean\''),
        ("local_sgd", {"architecture": "gossip(ring)"}, "all ranks form means together"),
        ("diloco", {"period": 0}, "at least 1, got 0"),
        ("diloco", {"fragments": 0}, "fragments must be at least 1, got 0"),
        ("diloco", {"period": 4, "delay": 4}, "delay must lie in 0 .. period - 1 = 3, got 4"),
        ("diloco", {"mixing": 2.0}, "mixing must lie in 0 .. 1, got 2.0"),
        ("diloco", {"outer": 0.7}, "outer is a function .* got float"),
        ("diloco", {"outer": _model()[1]}, "outer is a function .* got SGD"),
        ("decentralized", {"period": -1}, "at least 1, got -1"),
        ("decentralized", {"graph": "rnig"}, "rnig"),
        ("decentralized", {"algorithm": "adpsgd"}, "adpsgd has no rounds"),
    ],
)
def test_refusals(method, options, match):
    with pytest.raises(ValueError, match=match):
        getattr(gradwire, method)(*_model(), **options)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\xff\xff",
        b"[]",
        b"{}",
        b'{"part": 1, "step": 0, "is_finite": true, "since": [0], '
        b'"changed": [], "extras": [], "closes": false}',
        b'{"part": 0, "step": "", "is_finite": true, "since": [0], '
        b'"changed": [], "extras": [], "closes": false}',
        b'{"part": 0, "step": 0, "is_finite": true, "since": 0, '
        b'"changed": [], "extras": [], "closes": false}',
        b'{"part": 0, "step": 0, "is_finite": true, "since": [0, 1], '
        b'"changed": [], "extras": [], "closes": false}',
        b'{"part": 0, "step": 0, "is_finite": true, "since": [0], '
        b'"changed": [{}], "extras": [], "closes": false}',
        b'{"part": 0, "step": 0, "is_finite": true, "since": [0], '
        b'"changed": [], "extras": [], "closes": 1}',
    ],
)
def test_bytes_that_are_no_notice_are_refused(sent):
    own = Notice(0, 3, True, [0], [], [], False)
    row = torch.tensor(list(sent), dtype=torch.uint8)
    with pytest.raises(WireError, match="rank 1 sent bytes that are not the notice of a round"):
        read_notice(row, 1, own)
    assert read_notice(packed(own._asdict()), 1, own) == own


@pytest.mark.parametrize("method", ["local_sgd", "diloco", "decentralized"])
def test_what_is_not_a_model_and_its_optimizer(method):
    make, (model, optimizer) = getattr(gradwire, method), _model()
    with pytest.raises(ValueError, match=r"model is a torch\.nn\.Module, got 3"):
        make(3, optimizer)
    with pytest.raises(ValueError, match="optimizer is a torch optimizer, got 'sgd'"):
        make(model, "sgd")
    with pytest.raises(ValueError, match="2 of the 2 parameters of the optimizer are not in the"):
        make(_linear(), optimizer)
    with pytest.raises(RuntimeError, match="init_process_group"):
        make(model, optimizer)
