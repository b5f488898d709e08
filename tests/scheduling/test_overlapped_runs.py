"""Overlap beside the rest of a run: what-if replay, checkpoints, faults, networks with a shape."""

import pytest
import torch

import gradwire
from scheduling.schedule_runs import (
    OVERLAPPING,
    SETTINGS,
    assert_same_bits,
    train,
    train_in_sequence,
)


@pytest.mark.parametrize(
    "scheduling",
    [
        "wfbp",
        "fusion(2000, first=500)",
        "mgwfbp(groups=(2,))",
        "priority(1000, credit=100000, merge=1000)",
    ],
)
@pytest.mark.parametrize("compression", ["identity", "ef(topk(0.1))"])
def test_replayed_times_are_those_of_runs_on_that_network(scheduling, compression):
    settings = {"scheduling": scheduling, "compression": compression, "eval_every": 2}
    run = train(bandwidth="10Mbit", what_if=("1Mbit", "1Gbit"), **settings)
    for bandwidth in ("1Mbit", "1Gbit"):
        alone = train(bandwidth=bandwidth, **settings)
        assert run.summary["virtual_times_s"][bandwidth] == pytest.approx(alone.virtual_time_s)
        assert torch.equal(run.params, alone.params)


@pytest.mark.few(2)
@pytest.mark.parametrize("synchronization", ["bsp", "localsgd(2)"])
@pytest.mark.parametrize("scheduling", [*OVERLAPPING[::-3], *OVERLAPPING[1:3]])
def test_an_interrupted_run_ends_in_the_same_bits(scheduling, synchronization, tmp_path):
    settings = {
        **SETTINGS,
        "scheduling": scheduling,
        "synchronization": synchronization,
        "compression": "ef(topk(0.1))",
        "optimizer": "sgd(0.1, momentum=0.9)",
        "compute": "lognormal(0.001)",
        "what_if": ("10Mbit",),
        "steps": 7,
        "eval_every": 2,
    }
    whole = gradwire.simulate(**settings, out=tmp_path / "whole")

    def interrupt(row, steps):
        if row["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradwire.simulate(**settings, out=tmp_path / "cut", progress=interrupt)
    resumed = gradwire.resume(tmp_path / "cut")
    assert_same_bits(resumed, whole)
    assert resumed.metrics == whole.metrics
    assert resumed.ledger.snapshot() == whole.ledger.snapshot()


@pytest.mark.parametrize("scheduling", OVERLAPPING)
def test_how_often_a_run_is_evaluated_does_not_change_its_bits(scheduling):
    settings = {"scheduling": scheduling, "compression": "ef(topk(0.1))"}
    assert_same_bits(train(eval_every=1, **settings), train(eval_every=100, **settings))


@pytest.mark.parametrize("scheduling", OVERLAPPING)
def test_lost_messages_cost_time_only(scheduling):
    settings = {"scheduling": scheduling, "compression": "ef(topk(0.1))"}
    lossy = train(faults=("loss(0.05)",), **settings)
    assert_same_bits(lossy, train_in_sequence(**settings))
    assert lossy.virtual_time_s > train(**settings).virtual_time_s


@pytest.mark.parametrize("scheduling", OVERLAPPING)
@pytest.mark.parametrize("topology", ['racks(2, uplink="1Mbit")', "wan(2)"])
@pytest.mark.parametrize("architecture", ["allreduce", "hierarchical(2)", "parameter_server"])
def test_a_shape_of_the_network_changes_times_only(scheduling, topology, architecture):
    settings = {"scheduling": scheduling, "architecture": architecture, "compression": "fp16"}
    shaped = train(topology=topology, **settings)
    assert_same_bits(shaped, train_in_sequence(topology=topology, **settings))
    assert shaped.virtual_time_s > train(**settings).virtual_time_s


@pytest.mark.parametrize("scheduling", OVERLAPPING)
def test_a_worker_that_crashes_does_not_stop_the_others(scheduling):
    run = train(
        scheduling=scheduling,
        synchronization="asp",
        architecture="parameter_server",
        faults=("crash(2, at=0.002)",),
        steps=6,
    )
    assert [row["rank"] for row in run.summary["lost"]] == [2]
    assert torch.isfinite(run.params).all()


@pytest.mark.parametrize("scheduling", OVERLAPPING)
def test_a_crash_in_the_middle_of_an_overlapped_step_is_reported(scheduling):
    with pytest.raises(gradwire.core.errors.StoppedError, match="rank 1"):
        train(scheduling=scheduling, faults=("crash(1, at=0.0035)",), heartbeat="10ms")


@pytest.mark.parametrize("scheduling", OVERLAPPING)
def test_gradients_that_are_not_finite_are_reported(scheduling):
    with pytest.raises(gradwire.core.errors.NonFiniteError, match=r"in step 1\b"):
        train(scheduling=scheduling, optimizer="sgd(1e38)")
