"""Gossip under real training."""

import pytest
import torch

import gradwire
from gradwire.core.errors import GradwireWarning


def run(**settings):
    return gradwire.simulate(**{"steps": 12, "compute": "fixed(0.005)", **settings})


def test_diffusion_on_a_complete_graph_is_bsp():
    # All start from one model, and one round is the exact mean: x <- mean(x - lr g_j).
    bsp = run()
    diffusion = run(architecture="gossip(complete, diffusion)")
    assert torch.allclose(bsp.params, diffusion.params, atol=1e-5)
    assert diffusion.accuracy == pytest.approx(bsp.accuracy, abs=0.01)


@pytest.mark.few
@pytest.mark.parametrize(
    ("architecture", "synchronization", "compression"),
    [
        ("gossip(ring)", "localsgd(3)", "identity"),
        ("gossip(ring, choco(0.4))", "bsp", "topk(0.1)"),
        ("gossip(ring, adpsgd)", "asp", "identity"),
    ],
)
def test_combinations_run(architecture, synchronization, compression):
    result = run(
        architecture=architecture, synchronization=synchronization, compression=compression
    )
    assert torch.isfinite(result.params).all()
    assert result.bytes_sent > 0
    spread = torch.stack([replica.params for replica in result.replicas]).std(0).mean()
    assert 0 < spread < result.params.abs().mean()


@pytest.mark.few
@pytest.mark.parametrize("algorithm", ["dpsgd", "choco(0.4)", "adpsgd"])
def test_a_worker_crashes_and_comes_back(algorithm):
    result = run(
        architecture=f"gossip(ring, {algorithm})",
        synchronization="asp" if algorithm == "adpsgd" else "bsp",
        faults=("crash(1, at=0.012, rejoin=0.041)",),
        heartbeat="10ms",
    )
    assert all(replica is not None for replica in result.replicas)
    assert torch.isfinite(result.params).all()


def test_compression_is_refused_before_anything_runs(tmp_path):
    compression, out = "ef(topk(ramp(0.25, 0.01, steps=5)))", tmp_path / "run"
    with pytest.raises(ValueError, match="plain codec") as refusal:
        run(architecture="gossip(ring, choco(0.4))", compression=compression, out=out)
    assert str(refusal.value).startswith(compression)
    assert "virtual time" not in str(refusal.value)
    assert not out.exists()


def test_a_warning_comes_with_the_plan():
    with pytest.warns(GradwireWarning, match="unbiased") as noted:
        run(architecture="gossip(ring, dcd)", compression="topk(0.1)", steps=1)
    assert len([one for one in noted if one.category is GradwireWarning]) == 1


def test_staleness_is_counted_per_gradient():
    result = run(architecture="gossip(ring, adpsgd)", synchronization="asp")
    for replica in result.replicas:
        assert int(replica.memory["staleness_count"]) == replica.num_gradients == 12
        assert int(replica.memory["staleness_sum"]) >= int(replica.memory["staleness_max"]) >= 1


def test_pairs_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="average whenever they like, not in rounds"):
        run(architecture="gossip(ring, adpsgd)", synchronization="bsp")
    with pytest.raises(ValueError, match="Try"):
        run(architecture="gossip(ring)", synchronization='localsgd(4, momentum="average")')
