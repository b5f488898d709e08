"""Shards inside a node, compression between nodes: FSDP2 with gradwire.compress_replicas."""

from typing import Any

import pytest
import torch.distributed.fsdp as fsdp

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
        assert difference < 1e-6
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


def test_a_model_that_is_not_sharded_is_refused(ranks):
    assert all("has no FSDP module: shard it first" in result["refused"] for result in ranks)


def test_a_saved_run_continues(ranks):
    assert [result["continued"] for result in ranks] == [0.0] * 4
