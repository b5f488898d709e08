"""Hook, optimizer and compress_replicas on CUDA: `pytest tests/integration/test_cuda.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp

from integration import cuda_cases
from integration.cuda_cases import COMPRESSIONS, STEPS
from runtime.process.launching import launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator (CUDA)")
USES = ("hook", "optimizer")
SECONDS = 300


def run(folder: Path, size: int, case: Any) -> list[Any]:
    codes, results = launch(folder, size, f"integration.cuda_cases:{case.__name__}", SECONDS)
    assert codes == [0] * size
    return results


@pytest.fixture(scope="module")
def on_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run(tmp_path_factory.mktemp("gloo"), 2, cuda_cases.on_gloo)


@pytest.mark.parametrize("text", COMPRESSIONS)
@pytest.mark.parametrize("use", USES)
def test_replicas_stay_equal_over_gloo(on_gloo, use, text):
    for result in on_gloo:
        is_same, steps, difference = result[f"{use} {text}"]
        assert is_same
        assert steps == STEPS
        if text == "identity":
            assert difference < 1e-6
        else:
            assert 0 < difference < 1


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch was built without nccl")
def test_one_rank_with_nccl(tmp_path):
    (result,) = run(tmp_path, 1, cuda_cases.on_nccl)
    assert result == {f"{use} {text}": [True, STEPS] for use in USES for text in COMPRESSIONS}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    if not hasattr(getattr(fsdp, "FSDPModule", None), "set_all_reduce_hook"):
        pytest.skip("this torch has no FSDPModule.set_all_reduce_hook (2.7 has)")
    results = run(tmp_path_factory.mktemp("fsdp"), 2, cuda_cases.on_replicas)
    for result in results:
        if result["native"]:
            pytest.skip(f"FSDP2 alone does not run on CUDA over gloo here: {result['native']}")
    return results


@pytest.mark.parametrize("text", COMPRESSIONS)
def test_replicas_of_fsdp_stay_equal(replicas, text):
    for result in replicas:
        assert result[text] == [True, STEPS]
